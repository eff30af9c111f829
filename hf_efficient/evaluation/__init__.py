"""Measurements of models: perplexity, tasks, speed, memory and what a device can do at most."""
