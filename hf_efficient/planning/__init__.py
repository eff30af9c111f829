"""What a model will need, before it is loaded."""
