"""What is said: the output of the ranks, metrics in it, and what `train` itself says, without secrets."""
