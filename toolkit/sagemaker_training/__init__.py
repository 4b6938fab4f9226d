"""What published scripts import of AWS's toolkit, whose place `train` takes: `sagemaker_training.environment` alone.

Nothing else of that package is here, and importing it does nothing. Installing AWS's own replaces
this package and the command `train`.
"""
