"""Forwards of a model over a cache, captured, and the pool that keeps them between calls."""
