"""Brings images into being: built on an engine, bundled for another machine, pushed to a registry."""
