"""Replaces the one module of AWS's toolkit that published scripts import: `sagemaker_training.environment`.

Importing this package does nothing. Installing AWS's toolkit replaces it and the command `train`.
"""
