"""Pages that requests of continuous batching share hold what the model had computed when they were written: once its
weights or functions change, new requests do not find them. Only for models whose attention is ours."""

import functools


_MODEL = "_hf_efficient_model"  # attribute of a cache: whose keys and values it holds
_VERSION = "_hf_efficient_version"  # attribute of a cache: that model as it was when pages were last looked for
_IS_OLD = "_hf_efficient_is_old"  # attribute of a request that has pages of a model that has changed


def register(schedulers: list[type], cache: type) -> None:
    """Puts our methods in the place of those of transformers' classes. Idempotent."""
    if not hasattr(cache.mark_complete_blocks, "_hf_efficient"):
        cache.mark_complete_blocks = _of_one_model(cache.mark_complete_blocks)
        for scheduler in schedulers:
            scheduler.schedule_batch = _looking_at_the_model(scheduler.schedule_batch)


def follow(model, cache) -> None:
    """Has the requests of `cache` find pages of `model` as it is only."""
    setattr(cache, _MODEL, model)


def _looking_at_the_model(original):
    """transformers' `schedule_batch`, in which requests that wait look for pages that hold their first tokens."""

    @functools.wraps(original)
    def schedule_batch(self, *args, **kwargs):
        model = getattr(self.cache, _MODEL, None)
        if model is not None and self.cache.use_prefix_sharing and self.waiting_requests:
            from hf_efficient.generation import model_state  # which imports much: when a request comes

            version, before = model_state.current(model), getattr(self.cache, _VERSION, None)
            setattr(self.cache, _VERSION, version)
            if before not in (None, version):
                _forget(self)
        return original(self, *args, **kwargs)

    schedule_batch._hf_efficient = True
    return schedule_batch


def _forget(scheduler) -> None:
    """Nobody finds the pages that there are. Requests that read them go on."""
    scheduler.cache.evict_cached_blocks()
    for allocator in scheduler.cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()
    swapped = (state for state in scheduler.waiting_requests.values() if state.is_cpu_offloaded)
    for state in (*scheduler.active_requests.values(), *swapped):
        setattr(state, _IS_OLD, True)


def _of_one_model(original):
    """transformers' `mark_complete_blocks`, for requests whose pages the model as it is has written alone."""

    @functools.wraps(original)
    def mark_complete_blocks(self, state, complete_blocks):
        if not hasattr(state, _IS_OLD):
            original(self, state, complete_blocks)

    mark_complete_blocks._hf_efficient = True
    return mark_complete_blocks
