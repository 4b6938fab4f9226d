"""Shoal's host side: builds training images from Jinja templates, runs them as training jobs, and reports on both."""

__version__ = "0.1.0"
