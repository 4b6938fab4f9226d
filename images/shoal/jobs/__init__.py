"""Runs an image as a training job, in containers or on this machine."""
