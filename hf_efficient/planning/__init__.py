"""What a model will need, computed before it is loaded, and what this machine can do."""
