"""Builds images, bundles the inputs of builds for offline hosts, and pushes images to a registry."""
