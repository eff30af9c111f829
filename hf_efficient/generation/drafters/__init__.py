"""Drafters: each file guesses the next tokens of a sequence in one way. `base` defines the interface."""
