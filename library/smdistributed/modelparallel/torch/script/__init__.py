"""The interface of scripts: the model, the optimizer, steps and checkpoints, and the gradients between them."""
