"""Which modules of a model are compressed."""
