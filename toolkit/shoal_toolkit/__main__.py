"""`python -m shoal_toolkit` is `train`."""

from shoal_toolkit.cli import command

command()
