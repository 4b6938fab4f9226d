"""Shoal's host side: builds training images from Jinja templates and runs them as training jobs."""

__version__ = "0.1.0"
