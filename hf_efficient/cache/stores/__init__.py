"""Storage for the pages of a layer: one class per format or place."""
