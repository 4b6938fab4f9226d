"""The content of a saved image's layers, and the package that owns each file."""
