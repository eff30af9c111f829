"""Checkpoints: their headers and checks, saving, other libraries' formats in and out."""
