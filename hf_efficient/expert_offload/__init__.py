"""Mixtures of experts larger than the memory of their device: hot experts stay there, the others on the host or in
files."""
