"""Runs calibration text through a model one block at a time, for methods that need to see activations."""
