"""Checkpoints: their headers and checks, other libraries' formats in and out."""
