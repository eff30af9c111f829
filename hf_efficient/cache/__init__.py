"""Key-value caches. `block_pool` is the bookkeeping (which blocks belong to which sequence; pure Python, no tensors),
`step` is the plan of one forward over it and `device_tables` what kernels see of it, `paged_cache` is the transformers
`Cache` with the tensors and `page_handle` how the attention gets at them. `persistence` saves and loads one, `offload`
lets pages leave the device (`tiered_store`), `stats` and `memory_budget` count them."""
