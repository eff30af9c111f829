"""Generation: the native decoding loop behind `generate()`, drafters, speculation, and the training of draft heads."""
