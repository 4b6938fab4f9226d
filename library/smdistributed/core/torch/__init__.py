"""The engine for PyTorch: the process group that averages gradients, for data and for model parallel training."""
