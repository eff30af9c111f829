"""Shortens prompts: a small model finds the tokens that a large one needs least."""
