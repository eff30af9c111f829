"""A forward captured once and replayed, as CUDA graphs do on a GPU."""
