"""`python -m lut4tool` is the command."""

from lut4tool.cli import main

main()
