"""Modules at the end of Python's path (shoal-toolkit.pth): an installed module of the same name is found first."""
