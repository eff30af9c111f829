"""The attention ops over tensors and over pages, and their implementations for each device."""
