"""Eviction in transformers' continuous batching, as of transformers 5.19: allocators of layers that attend to
everything, whose requests hold fewer tokens than they have had."""

from transformers.generation.continuous_batching import cache_allocators

from hf_efficient.cache.request_eviction import RequestEviction


class Evicting:
    """For an allocator. Requests share no blocks, as others of their tokens stay.

    eviction: the `RequestEviction`; None before `begin`.
    """

    supports_block_sharing = False
    eviction: RequestEviction | None = None

    def begin(self, policy, group, config, most_new: int) -> None:
        """Requests are evicted from by `policy`. group: the `PageGroup` of the layers. config: of the model. most_new:
        tokens of a step."""
        self.eviction, self._most_new = RequestEviction(policy, group, config), most_new

    def most_held(self, tokens: int) -> int:
        """How many tokens of a request of `tokens` are held at most, at any time."""
        policy = self.eviction.policy
        return min(tokens, policy.target(tokens) + self._most_new) if policy.when == "always" else tokens

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, past_length - self.dropped(request_id), query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, past_length - self.dropped(request_id), query_length)

    def dropped(self, request_id: str) -> int:
        return 0 if self.eviction is None else self.eviction.dropped(request_id)

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int):
        self.eviction.fork(source_request_id, dest_request_id)
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        if self.eviction is not None:
            self.eviction.forget(request_id)
        super().free_blocks(request_id, no_cache)

    def evict(self, request_id: str, seen: int, new: int, is_prompt: bool) -> None:
        """Evicts what is beyond the budget of a request that has had `seen` tokens, and gives its blocks back."""
        table = self.block_table[request_id]
        held = self.eviction.after(request_id, seen, new, is_prompt, table)
        blocks = -(-held // self.tokens_per_page)
        self.pool.free_blocks(self.index, table[blocks:])
        del table[blocks:]


class EvictingFullAllocator(Evicting, cache_allocators.FullAttentionCacheAllocator):
    """Pages in the model's dtype."""
