"""The matrix products of compressed weights, one family a file."""
