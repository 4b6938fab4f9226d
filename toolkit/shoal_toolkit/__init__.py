"""Runs in the training container: reads the SageMaker contract and launches the script (command `train`)."""

__version__ = "0.1.0"
