"""Inspects images: their contents, vulnerabilities and differences, and whether their tags are correct."""
