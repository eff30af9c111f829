"""Observers: what is recorded of activations while calibration text runs through a model. One file an observer, plain
torch."""
