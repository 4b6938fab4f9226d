"""The commands of `shoal`, one module per subject."""
