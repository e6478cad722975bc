"""The root of every error that lut4tool raises on purpose; each layer has one type of its own below it."""


class Lut4Error(Exception):
    """An error whose text is one clear sentence for a user; the command line prints it and exits 1."""
