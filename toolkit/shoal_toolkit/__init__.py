"""Reads the SageMaker contract in the training container and launches the script (command `train`)."""

__version__ = "0.1.0"
