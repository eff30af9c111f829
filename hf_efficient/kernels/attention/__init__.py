"""The attention ops: who computes them on which device, over tensors and over pages."""
