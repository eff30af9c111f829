"""What changes a model after it is loaded: structured pruning, recovery of quality."""
