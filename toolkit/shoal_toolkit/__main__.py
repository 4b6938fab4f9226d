"""Runs the command `train`: `python -m shoal_toolkit`."""

from shoal_toolkit.cli import command

command()
