"""Which token is in which block: plain Python, and the small tensors of it that kernels read."""
