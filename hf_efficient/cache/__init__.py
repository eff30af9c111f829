"""Key-value caches in pages.

`bookkeeping` says which blocks belong to which sequence, `stores` hold the pages of a layer, `eviction` chooses what a
full cache keeps. `paged_cache` is the transformers `Cache` over them, `page_handle` what the attention gets of it.
"""
