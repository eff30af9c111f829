"""Key-value caches. `block_pool` is the bookkeeping (which blocks belong to which row; pure Python, no tensors),
`step` is the plan of one forward over it, `paged_cache` is the transformers `Cache` with the tensors."""
