"""The keys and values of a layer that evicts tokens: each key head of each sequence keeps different tokens."""

from collections.abc import Callable

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.bookkeeping.device_tables import DeviceTables
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.cache.eviction.base import EvictionPolicy, View
from hf_efficient.cache.eviction.rotary import Rotary
from hf_efficient.cache.stores.full_precision import PageStore


_PROMPT = 64  # columns: a longer forward of a filled cache is a prompt; shorter ones speculation may take back
_PENDING = 64  # forwards whose queries may wait to be accumulated
_SCORES = 1 << 24  # attention probabilities that are held at a time, 64 MB of float32


class EvictingStore(PageStore):
    """A `PageStore` of one head over a pool for this layer alone, so that heads keep different tokens.

    Key head h of sequence b is sequence b * Hk + h of the pool, "inner sequence" below; the attention takes it for a
    sequence like any other.

    pool: blocks and lengths of the inner sequences. store: their pages. seen: tokens that each sequence of the batch
        has had.
    """

    def __init__(
        self, policy: EvictionPolicy, rotary: Rotary | None, make_store: Callable, block_size: int, key, value
    ):
        """make_store: (pool, capacity, key, value) -> `PageStore`. key [B, Hk, S, D], value [B, Hk, S, Dv]: like those
        that will be stored."""
        self.policy, self.rotary, self._make_store = policy, rotary, make_store
        self.dtype, self.device, self.form = key.dtype, key.device, self.form_of(key, value)
        self.rows, self.heads = {}, key.shape[1]
        self.pool = BlockPool(block_size)
        self.pool.add_sequences(key.shape[0] * self.heads)
        self.store = self._new_store(0, key[:, :1], value[:, :1])
        self.seen = [0] * key.shape[0]
        self._floors = [0] * key.shape[0]  # the fewest tokens that each sequence can be rewound to
        self._tables: DeviceTables | None = None
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # queries [B, Hq, S, D] and their positions
        with torch.inference_mode(False):  # of every inner sequence, in the order of its tokens
            self._positions = torch.empty(len(self.pool.tables), 0, dtype=torch.int64, device=key.device)
            self._accumulated = torch.empty(len(self.pool.tables), 0, device=key.device, dtype=torch.float32)
            self._sinks = (
                None  # keys and values of the first tokens as they were read first, [sequences, sinks, D + Dv]
            )
        self._placed = [0] * len(self.pool.tables)  # tokens in `_positions`; those behind them are consecutive

    def _new_store(self, capacity: int, key, value) -> PageStore:
        store = self._make_store(self.pool, capacity, key, value)
        store.exact = False  # no other cache has heads of unequal lengths, whose bits it could have
        return store

    @property
    def pages(self) -> dict[str, torch.Tensor]:
        return self.store.pages

    def make_room(self, capacity, moves, copies) -> None:
        """Nothing: the blocks of the cache's own pool are not those of this store."""

    def select(self, sequences: list[int]) -> None:
        inner = [sequence * self.heads + head for sequence in sequences for head in range(self.heads)]
        self.pool.fork(inner)
        self.seen, self._floors = (
            [self.seen[sequence] for sequence in sequences],
            [self._floors[sequence] for sequence in sequences],
        )
        self._placed = [self._placed[sequence] for sequence in inner]
        self._positions, self._accumulated = self._positions[inner], self._accumulated[inner]
        self._sinks = None if self._sinks is None else self._sinks[inner]
        self._pending = [(queries[sequences], positions[sequences]) for queries, positions in self._pending]
        self._tables = None

    def check_rewind(self, lengths: list[int]) -> None:
        if any(length < floor for length, floor in zip(lengths, self._floors)):
            raise ValueError(
                f"PagedCache(eviction=...) cannot go back to {lengths} tokens per sequence: tokens before the last "
                f"eviction are gone, and {self._floors} tokens are the least it can go back to"
            )

    def rewind(self, lengths: list[int]) -> None:
        removed = [seen - length for seen, length in zip(self.seen, lengths)]
        inner = [length - removed[sequence // self.heads] for sequence, length in enumerate(self.pool.lengths)]
        self.pool.rewind(inner)
        self.seen, self._tables = list(lengths), None
        self._placed = [min(placed, length) for placed, length in zip(self._placed, inner)]
        columns = torch.arange(self._accumulated.shape[1], device=self.device)
        self._accumulated = self._accumulated * (columns < to_device(inner, torch.int64, self.device)[:, None])
        ends = to_device(self.seen, torch.int64, self.device)[:, None]
        self._pending = [(queries, positions.where(positions < ends, -1)) for queries, positions in self._pending]

    def attend(
        self, plan: ForwardPlan, tables_on, query, key, value, *, window_size, s_aux=None, **options
    ) -> torch.Tensor:
        if key is None:
            raise ValueError(
                "PagedCache(eviction=...): the model shares keys between layers; use a cache without eviction"
            )
        if s_aux is not None:
            raise ValueError("PagedCache(eviction=...) cannot hold models with attention sinks of their own (s_aux)")
        if window_size[0] >= 0:
            raise ValueError(
                "PagedCache(eviction=...): a layer of full attention was asked for a sliding window of "
                f"{window_size[0] + 1}"
            )
        batch, heads, width, dim = key.shape
        inner_plan = self._inner_plan(plan, batch, width)
        output = self.store.attend(
            inner_plan,
            lambda device: self._tables_on(inner_plan, device),
            query.reshape(batch * heads, -1, width, dim),
            key.reshape(-1, 1, width, dim),
            value.reshape(-1, 1, width, value.shape[3]),
            window_size=window_size,
            **options,
        )
        output = output.view(batch, heads, *output.shape[1:]).permute(0, 2, 1, 3, 4).flatten(2, 3)
        self._observe(plan, inner_plan, query, options)
        return output

    def _inner_plan(self, plan: ForwardPlan, batch: int, width: int) -> ForwardPlan:
        """`plan` in the blocks of this pool."""
        pool, each = self.pool, range(self.heads)
        counts = [end - start for start, end in zip(plan.starts, plan.lengths) for _ in each]
        starts = list(pool.lengths)
        try:
            change = pool.append(counts)
        except ValueError:  # until the next eviction there may be more than the budget
            pool.num_blocks = None
            change = pool.append(counts)
        self.store.make_room(*change)
        self.seen = list(plan.lengths)
        valid = None if plan.valid is None else plan.valid.repeat_interleave(self.heads, 0)
        return ForwardPlan(pool, change, starts, valid, width)

    def _tables_on(self, inner_plan: ForwardPlan, device) -> DeviceTables:
        changes = self.pool.table_changes()
        if self._tables is not None and self._tables.fits(self.pool):
            self._tables.update(changes, inner_plan.starts, 0)
        else:
            self._tables = DeviceTables(self.pool, inner_plan.starts, 0, device)
        return self._tables

    def _observe(self, plan: ForwardPlan, inner_plan: ForwardPlan, query: torch.Tensor, options: dict) -> None:
        """After the attention: keeps the queries that the scorer wants to see, and evicts tokens beyond the budget."""
        policy, scorer = self.policy, self.policy.scorer
        is_prompt = plan.width > _PROMPT or not any(plan.starts)
        if policy.when == "prefill" and not is_prompt:
            self._pending.clear()
            return
        if scorer.window or scorer.accumulates:
            self._pend(plan, query, 0 if scorer.accumulates else scorer.window)
        targets = [policy.target(seen) for seen in self.seen]
        held = self.pool.lengths
        sums = [sum(held[start : start + self.heads]) for start in range(0, len(held), self.heads)]
        full = [total > target * self.heads for total, target in zip(sums, targets)]
        if not any(full) and not (scorer.accumulates and (is_prompt or len(self._pending) >= _PENDING)):
            return
        budgets = [
            policy.left(target, self.pool.block_size, is_prompt) if over else -1 for target, over in zip(targets, full)
        ]
        view = self._view(inner_plan, budgets, options)
        if scorer.accumulates:
            view = self._accumulate(view)
        if any(full):
            new = [0 if is_prompt else end - start for start, end in zip(plan.starts, plan.lengths)]
            self._evict(view, budgets, new)

    def _pend(self, plan: ForwardPlan, query: torch.Tensor, window: int) -> None:
        """Keeps the last `window` queries of `plan`, 0 for all."""
        starts = to_device(plan.starts, torch.int64, query.device)[:, None]
        if plan.valid is None:
            positions = starts + torch.arange(plan.width, device=query.device)
        else:
            valid = plan.valid.to(query.device)
            query, positions = _padding_first(query, torch.where(valid, starts + valid.cumsum(1) - 1, -1))
        if plan.width > 1:
            query, positions = query[:, :, -window:].clone(), positions[:, -window:]
        self._pending.append((query, positions))
        if window and len(self._pending) > 2 * window:
            del self._pending[:-window]

    def _view(self, inner_plan: ForwardPlan, budgets: list[int], options: dict) -> View:
        """What the scorer reads: the stored tokens of each head, and the queries that were observed."""
        batch, window = len(self.seen), self.policy.scorer.window
        keys, values = (
            states.reshape(batch, self.heads, -1, states.shape[3]) for states in self.store.read(inner_plan)
        )
        positions, present = self.token_positions()
        queries = torch.cat([part for part, _ in self._pending], 2) if self._pending else keys[:, :, :0]
        query_positions = torch.cat([part for _, part in self._pending], 1) if self._pending else positions[:batch, :0]
        if window and not self.policy.scorer.accumulates:
            queries, query_positions = _padding_first(queries, query_positions)  # padding of every forward
            queries, query_positions = queries[:, :, -window:], query_positions[:, -window:]
        shape = batch, self.heads, keys.shape[2]
        scale = options.get("softmax_scale")
        return View(
            keys=keys,
            values=values,
            key_positions=positions.view(shape),
            present=present.view(shape),
            queries=queries,
            query_positions=query_positions,
            softmax_scale=keys.shape[3] ** -0.5 if scale is None else scale,
            softcap=options.get("softcap") or 0.0,
            budgets=budgets,
            accumulated=None,
            rotate=self.rotary,
        )

    def token_positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [inner sequences, longest], how many tokens of its sequence came before each token that is held, and
        bool of that shape, False behind the end of an inner sequence."""
        count = torch.arange(max(self.pool.lengths), device=self.device)
        lengths = to_device(self.pool.lengths, torch.int64, self.device)[:, None]
        seen = to_device(self.seen, torch.int64, self.device).repeat_interleave(self.heads)[:, None]
        positions = seen - lengths + count
        if self._positions.shape[1]:
            known = min(self._positions.shape[1], len(count))
            placed = to_device(self._placed, torch.int64, self.device)[:, None]
            positions[:, :known] = torch.where(count[:known] < placed, self._positions[:, :known], positions[:, :known])
        return positions, count < lengths

    def _accumulate(self, view: View) -> View:
        """Adds up what the scorer makes of the pending queries, some of them at a time."""
        sequences, length = len(self.pool.lengths), view.keys.shape[2]
        total, before = self._accumulated.new_zeros(sequences, length), self._accumulated[:, :length]
        total[:, : before.shape[1]] = before
        total = total.view(view.present.shape)
        batch, heads, width = view.queries.shape[:3]
        piece = max(1, _SCORES // (batch * heads * length))
        for start in range(0, width, piece):
            columns = slice(start, start + piece)
            part = view._replace(queries=view.queries[:, :, columns], query_positions=view.query_positions[:, columns])
            total = total + self.policy.scorer.accumulate(part)
        self._accumulated = total.flatten(0, 1)
        self._pending.clear()
        return view._replace(accumulated=total)

    def _evict(self, view: View, budgets: list[int], last: list[int]) -> None:
        """Keeps `budgets[b]` tokens per head of sequence b on average, -1 for all; the `last[b]` last ones among
        them."""
        scorer, (batch, heads, length) = self.policy.scorer, view.present.shape
        held = [self.pool.lengths[sequence * heads : (sequence + 1) * heads] for sequence in range(batch)]
        counts = list(held)
        full = [sequence for sequence, budget in enumerate(budgets) if budget >= 0]
        scores = scorer.score(view).float()
        count = torch.arange(length, device=scores.device)
        recent = [
            max(scorer.recent_tokens(budget), min(new, budget - scorer.sinks)) for budget, new in zip(budgets, last)
        ]
        firsts = to_device(self.pool.lengths, torch.int64, scores.device).view(batch, heads)
        firsts = firsts - to_device(recent, torch.int64, scores.device)[:, None]
        stay = (count < scorer.sinks) | (count >= firsts[..., None])
        scores = scores.masked_fill(stay, float("inf")).masked_fill(~view.present, float("-inf"))
        chosen = scorer.counts(scores[full], [budgets[sequence] for sequence in full])
        for sequence, kept in zip(full, chosen):
            counts[sequence] = [min(number, now) for number, now in zip(kept, held[sequence])]
            self._floors[sequence] = max(self._floors[sequence], self.seen[sequence] - recent[sequence])
        flat = [number for kept in counts for number in kept]
        longest = max(flat)
        if min(flat) == longest:
            kept, present = scores.topk(longest, sorted=False).indices.sort().values, None
        else:
            ranks = scores.argsort(descending=True, stable=True).argsort()
            number = to_device(flat, torch.int64, scores.device).view(batch, heads, 1)
            present = torch.arange(longest, device=scores.device) < number
            kept = torch.where(ranks < number, count, length).sort().values[..., :longest].clamp_max(length - 1)
        self._compact(view, kept, present, flat)

    def _compact(self, view: View, kept: torch.Tensor, present: torch.Tensor | None, counts: list[int]) -> None:
        """Leaves only the tokens `kept`, int64 [B, Hk, longest], where `present` is true; None where all are.

        counts: tokens of each inner sequence. Pages are moved as they are, so that nothing is quantized twice.
        """
        evicted_before = [seen > self.pool.lengths[sequence * self.heads] for sequence, seen in enumerate(self.seen)]
        self._positions, self._placed = view.key_positions.gather(2, kept).flatten(0, 1), counts
        if view.accumulated is not None:
            sums = view.accumulated.gather(2, kept)
            self._accumulated = (sums if present is None else sums * present).flatten(0, 1)
        size, kept = self.pool.block_size, kept.flatten(0, 1)
        longest = max(map(len, self.pool.tables))
        table = to_device(
            [blocks + [0] * (longest - len(blocks)) for blocks in self.pool.tables], torch.int64, kept.device
        )
        sources = table.gather(1, kept // size) * size + kept % size
        self._rebuild(sources.flatten() if present is None else sources[present.flatten(0, 1)], counts, view)
        if self.policy.scorer.reindexes:
            self._move_sinks(view, evicted_before)

    def _rebuild(self, sources: torch.Tensor, counts: list[int], view: View) -> None:
        """Moves to a new pool of the tokens in the slots `sources`, `counts[i]` of each inner sequence i, one after the
        other."""
        room, old = None, self.store
        if self.policy.when == "always" and isinstance(self.policy.budget, int):
            room = len(counts) * (self.pool.blocks_for(max(*counts, self.policy.budget)) + 1)
        self.pool = BlockPool(self.pool.block_size, room)
        self.pool.add_sequences(len(counts))
        change = self.pool.append(counts)
        if change.capacity != old.capacity:
            self.store = self._new_store(change.capacity, view.keys[:, :1], view.values[:, :1])
        destinations = ForwardPlan(self.pool, change, [0] * len(counts), None, max(counts)).slot_mapping(sources.device)
        self.store.take(old, sources, destinations)
        self._tables = None

    def _move_sinks(self, view: View, evicted_before: list[bool]) -> None:
        """Rotates the keys of the sinks to the positions right before the tokens behind them."""
        sinks = min(self.policy.scorer.sinks, view.keys.shape[2])
        given = torch.cat([view.keys[:, :, :sinks], view.values[:, :, :sinks]], -1).flatten(0, 1)
        old = [sequence for sequence in range(len(given)) if evicted_before[sequence // self.heads]]
        if old:
            given[old] = self._sinks[old]
        self._sinks = given
        moved = [self.seen[sequence // self.heads] - count for sequence, count in enumerate(self.pool.lengths)]
        sequences = [sequence for sequence, distance in enumerate(moved) if distance]
        keys, values = given[sequences].split([view.keys.shape[3], view.values.shape[3]], -1)
        distance = to_device([moved[sequence] for sequence in sequences], torch.int64, keys.device)[:, None]
        slots = to_device(
            [self.pool.slots(sequence, 0, sinks) for sequence in sequences], torch.int64, keys.device
        ).flatten()
        keys, values = self.rotary(keys, distance).to(keys.dtype), values.contiguous()
        self.store.put(slots, keys.flatten(0, 1)[:, None], values.flatten(0, 1)[:, None])


def _padding_first(queries: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [B, Hq, W, D] and their positions [B, W], those of padding (-1) first, the others in their order."""
    order = (positions >= 0).long().argsort(dim=1, stable=True)
    return queries.gather(2, order[:, None, :, None].expand_as(queries)), positions.gather(1, order)


def bind(
    policy, state: CacheState, layer_types: list[str], kv_format: str, **excluded
) -> tuple[EvictionPolicy, Rotary | None] | None:
    """The policy and, where it moves keys, the rotary embedding of the model that `state` belongs to; None without a
    policy.

    excluded: arguments of `PagedCache` that must be None beside a policy.

    Raises ValueError for what is no policy, for models that cannot be evicted from and for other arguments.
    """
    if policy is None:
        return None
    if not isinstance(policy, EvictionPolicy):
        raise ValueError(
            f"eviction={policy!r}: must be an EvictionPolicy, such as EvictionPolicy(SnapKV(), budget=0.5)"
        )
    for argument, value in excluded.items():
        if value is not None:
            raise ValueError(
                f"{argument}={value!r} with eviction: leave one of them out (each layer keeps its tokens in a pool of "
                "its own, and the policy's budget bounds it)"
            )
    if kv_format in ("int4", "int2"):
        raise ValueError(
            f'kv_format={kv_format!r} with eviction: its tokens share scales and cannot leave one by one; use "int8", '
            '"fp8" or "auto"'
        )
    decoder = state.config
    name = type(decoder).__name__
    slides = getattr(decoder, "layer_types", None) is None and getattr(decoder, "sliding_window", None)
    if slides or "full_attention" not in layer_types:
        raise ValueError(f"eviction with {name}: the model has no layer of full attention to evict tokens from")
    if state.has_latents:
        raise ValueError(f"eviction with {name}: attention over compressed latents cannot read pages")
    return policy, Rotary(decoder) if policy.scorer.needs_rotary else None
