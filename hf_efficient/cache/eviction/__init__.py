"""Eviction of tokens from a paged cache: `base` says what a method is, and every paper is one file."""
