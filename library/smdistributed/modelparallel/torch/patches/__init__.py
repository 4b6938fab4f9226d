"""Replacements of torch's functions, by the names that scripts import."""
