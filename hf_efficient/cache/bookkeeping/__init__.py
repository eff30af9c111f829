"""Which token lies in which block: Python numbers, and the small tensors that kernels see of them."""
