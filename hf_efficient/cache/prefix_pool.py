"""The blocks of a `PrefixCache`: which tokens they hold, the pool, and the tiers below it."""

import torch

from hf_efficient.cache.bookkeeping.prefix_tree import Node, PrefixTree
from hf_efficient.cache.bookkeeping.recompute import Rates
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros, to_device
from hf_efficient.cache.prefix_tiers import LowerTiers, PrefixOffload
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.cache.stores.memory_budget import blocks_in, bytes_per_block


LOWER = "host", "disk"  # tiers below the pool


class PrefixPool:
    """Takes blocks from the pages of caches and gives them back. The arguments are those of `PrefixCache`; rates: of
    its `offload`.

    tree: which tokens lie where. forms: of each layer's pages. pools: of each layer, like `PageStore.pages`. lower: the
    other tiers.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int | None,
        memory: int | None,
        offload: PrefixOffload | None,
        rates: Rates | None,
    ):
        self._memory, self._offload, self._rates = memory, offload, rates
        self.tree = PrefixTree(num_blocks or 0, block_size)
        self.forget()

    def forget(self) -> None:
        """Empties all tiers and frees their memory."""
        self.tree.clear()
        self.forms: list[tuple] = []
        self.pools: list[dict[str, torch.Tensor]] = []
        self.lower: LowerTiers | None = None

    def stats(self) -> dict[str, int]:
        """The part of `PrefixCache.stats` that says what lies where."""
        tree, width = self.tree, 0 if self.lower is None else self.lower.block_bytes
        held = [self.pools, *(node.beginning for node in tree.nodes() if node.beginning is not None)]
        used = [tree.used(tier) if tier < len(tree.sizes) else 0 for tier in (1, 2)]
        return {
            "evicted_blocks": tree.num_evicted,
            "num_blocks": tree.num_blocks,
            "used_blocks": tree.num_used,
            "bytes": sum(x.nbytes for layers in held for tensors in layers for x in tensors.values()),
            **{f"{name}_blocks": number for name, number in zip(LOWER, used)},
            **{f"{name}_bytes": number * width for name, number in zip(LOWER, used)},
        }

    def give(self, layers: list, places: dict[int, Node]) -> list[int]:
        """Copies each node to a block of a cache's `layers`. places: block -> node. Returns how many came from each
        tier."""
        by_tier = [{place: x.block for place, x in places.items() if x.tier == tier} for tier in range(1 + len(LOWER))]
        if by_tier[0]:
            copy = _copier(by_tier[0])
            for layer, pools in zip(layers, self.pools):
                copy(pools, layer.store.pages)
        try:
            for tier, blocks in enumerate(by_tier[1:], 1):
                if blocks:
                    self.lower.give(tier, list(blocks.values()), [layer.store.pages for layer in layers], list(blocks))
        except BaseException:
            self.forget()  # else every prompt that begins so would fail
            raise
        return list(map(len, by_tier))

    def store(self, cache, sequences: dict[int, list[int]]) -> None:
        """Stores the whole blocks of sequences b of `cache`, whose tokens are `sequences[b]`, and brings those that lie
        in a lower tier back to the pool."""
        layers = cache._paged_layers
        forms = [form_of(layer) for layer in layers]
        try:
            if forms != self.forms:  # the first ones, or the model has another dtype now
                self._make_pools([layer.store for layer in layers])
                self.forms = forms
            copies, settled = {}, settled_tokens(layers, cache.state.pool.lengths)
            for b, sequence in sequences.items():
                new = self.tree.insert(cache.row_tokens.key.digest, sequence[: settled[b]])
                table, moves = cache.state.pool.tables[b], self.tree.moves()
                # a block may be evicted and taken again
                copies.update({node.block: table[number] for number, node in new if node.tier == 0})
                if new and new[0][0] == 0:
                    new[0][1].beginning = [layer.store.beginning(b) for layer in layers]
                if self.lower is not None:
                    self.lower.take_in(moves)
                    self._fill(layers, copies)  # before any of it leaves again
                    copies.clear()
                    beyond = [(node, table[number]) for number, node in new if node.tier > 0]
                    self.lower.take([layer.store.pages for layer in layers], beyond)
            self._fill(layers, copies)
        except BaseException:
            self.forget()  # else the tree would name blocks that were not filled
            raise

    def _fill(self, layers: list, copies: dict[int, int]) -> None:
        """Copies blocks of a cache's layers. copies: block of the pool -> block of the layers."""
        if copies:
            copy = _copier(copies)
            for layer, pools in zip(layers, self.pools):
                copy(layer.store.pages, pools)

    def _make_pools(self, stores: list[PageStore]) -> None:
        """Empty pools of blocks like those of the layers."""
        self.forget()
        size = sum(bytes_per_block(store) for store in stores)
        if self._memory is not None:
            if self._memory < size:
                raise ValueError(f"PrefixCache(memory={self._memory}): a block over all layers takes {size} bytes")
            self.tree.sizes[0] = blocks_in("memory", self._memory, self._memory, size)
        lower = [] if self._offload is None else self._offload.sizes(size)
        self.tree.sizes[1:] = lower
        self.tree.clear()
        number = self.tree.num_blocks
        with torch.inference_mode(False):  # inference tensors cannot be written to outside of inference mode
            self.pools = [
                {name: lazy_zeros(pages, number, *pages.shape[1:]) for name, pages in store.pages.items()}
                for store in stores
            ]
        if lower:
            self.lower = LowerTiers(self._offload, self.pools, lower, self._rates)


def settled_tokens(layers: list, lengths: list[int]) -> list[int]:
    """`PageStore.settled` of the layer that has settled least."""
    return [min(tokens) for tokens in zip(*(layer.store.settled(lengths) for layer in layers))]


def form_of(layer) -> tuple:
    """What layers of one format and block size must agree in to exchange blocks."""
    return layer.store.form, layer.store.device


def _copier(copies: dict[int, int]):
    """A function of (source, target), the pages of a layer, that copies block `copies[i]` of source to block i of
    target."""
    destinations, runs = sorted(copies), []
    for block in destinations:
        if runs and block == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, block + 1)
        else:
            runs.append(slice(block, block + 1))
    sources = [copies[block] for block in destinations]

    def copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        to, of = to_device([destinations, sources], torch.int64, next(iter(source.values())).device)
        for name, pages in source.items():
            if len(runs) > 4:
                target[name].index_copy_(0, to, pages.index_select(0, of))
            else:  # ten times faster on a CPU
                for run, chosen in zip(runs, of.split([run.stop - run.start for run in runs])):
                    torch.index_select(pages, 0, chosen, out=target[name][run])

    return copy
