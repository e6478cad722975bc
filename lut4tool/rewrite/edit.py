"""The only file that changes a graph: a proof's site becomes one node, and what only it used goes."""

from lut4tool.errors import Lut4Error


class RewriteError(Lut4Error):
    """A model that cannot be rewritten, or a place that cannot be written to, in words."""
