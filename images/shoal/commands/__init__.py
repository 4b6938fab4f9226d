"""The commands of `shoal`, by what they are about."""
