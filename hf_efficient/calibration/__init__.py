"""Runs calibration text through a model one block at a time, for methods that need to see activations.

`loading` is what `from_pretrained` calls, `run` walks along the blocks, and `block_compression` compresses one."""
