"""`PrefixCache`: keys and values of the common beginnings of prompts, kept between generations."""

import inspect
import threading
import weakref

import torch

from hf_efficient.cache.bookkeeping.model_key import ModelKey, check_model
from hf_efficient.cache.bookkeeping.prefix_tree import UNKNOWN
from hf_efficient.cache.bookkeeping.recompute import rates_of
from hf_efficient.cache.bookkeeping.row_tokens import Restored, mark_tokens
from hf_efficient.cache.layer_groups import layer_types_of
from hf_efficient.cache.prefix_hook import ForwardHook, columns_to_skip, is_plain
from hf_efficient.cache.prefix_pool import LOWER, PrefixOffload, PrefixPool, form_of, settled_tokens
from hf_efficient.cache.stores.kv_formats import block_size_of
from hf_efficient.cache.stores.memory_budget import check_pool_size, parse_bytes


_COUNTED = (
    *("hits", "misses", "bypassed", "prompt_tokens", "skipped_tokens"),
    *("pool_hits", "host_hits", "disk_hits", "recomputed_tokens"),
)
_MEASURED_TOKENS = 64  # of a forward at least, so that its time says what a prompt costs


class PrefixCache:
    """Keeps keys and values of prompts and answers for later generations of one model.

    Of a prompt that begins like an earlier one (a shared system prompt, the next turn of a chat), only the tokens from
    the first difference on are computed:

    >>> prefix = PrefixCache(model, num_blocks=256)
    >>> for inputs in prompts:
    ...     cache = PagedCache(model.config, prefix_cache=prefix)
    ...     output = model.generate(**inputs, max_new_tokens=8, past_key_values=cache)
    >>> prefix.stats()["hits"]
    1

    Every forward over such a cache stores the blocks that it completes, of prompts and of generated tokens. A forward
    whose first tokens are stored is shortened: the stored blocks are copied into the cache, and the model runs on the
    remaining tokens, at least `logits_to_keep` of them. Its output equals that of the whole forward up to rounding.
    All sequences of a batch are shortened by the same number of tokens, up to the first difference in any of them.

    These forwards are neither shortened nor stored, and are counted as `bypassed` in `stats()`: those with inputs other
    than token ids, 2-D masks and positions (embeddings, images, packed sequences, 4-D masks), those with an adapter for
    each sequence, those in training mode, and those with padding under an attention implementation that does not read
    pages. A forward that returns the logits of every position (`logits_to_keep=0`, the default of a direct call),
    hidden states, attentions or a loss is stored but not shortened. Tokens that a compiled forward or a replayed CUDA
    graph appends are not stored, nor are later ones.

    Changes of active and merged adapters, autocast and weights are noticed. Call `clear()` after other changes: added
    or removed hooks, other attributes of modules, and weights changed where torch does not count it: through `.data`
    (as PEFT does when it unmerges, with rounding) or NumPy, and of a model made in inference mode.

    Several threads may use one PrefixCache (on CUDA: on one stream).

    Args:
        model: a decoder-only model for text. Its forward is hooked for as long as this object lives. Of a PEFT model
            the base model is taken.
        num_blocks: blocks of the pool, each over all layers. When it is full, the least recently used ones are evicted.
        memory: instead of `num_blocks`, the bytes that the pool may take: an int, or "512MB", "2GiB". The first
            forward raises ValueError if not one block fits, or more than 16,777,216 do.
        block_size: tokens of a block, as in the caches; None: their default.
        kv_format: as in the caches. Under all but "auto" a shortened prompt attends to the stored, rounded keys and
            values, as a later chunk of a chunked prefill does. "int4" and "int2" store tokens once they are quantized,
            at most 256 tokens later. They do not quantize the first block of a prompt, which takes memory outside the
            pool.
        offload: a `PrefixOffload`: blocks that leave the pool move to host memory, and from there to the disk.

    Raises ValueError for other arguments, and for models whose keys depend on more than the tokens before them.
    """

    def __init__(
        self,
        model,
        num_blocks: int | None = None,
        *,
        memory: int | str | None = None,
        block_size: int | None = None,
        kv_format: str = "auto",
        offload: PrefixOffload | None = None,
    ):
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise ValueError(f"model={type(model).__name__}: must be a transformers model")
        if num_blocks is None and memory is None:
            raise ValueError(f"num_blocks={num_blocks} and memory={memory!r}: give one of them")
        check_pool_size(num_blocks, memory)
        if offload is not None and not isinstance(offload, PrefixOffload):
            raise ValueError(f"offload={offload!r}: must be an hf_efficient.PrefixOffload")
        block_size = block_size_of(kv_format, block_size)
        layer_types_of(model.config, model.config.get_text_config(decoder=True))  # raises for what no PagedCache holds
        check_model(model)
        self.block_size, self.kv_format = block_size, kv_format
        self._config = model.config.get_text_config(decoder=True)
        self._lock = threading.Lock()
        self._clears = 0
        self._rates = None if offload is None else rates_of(model, self._config)
        memory = None if memory is None else parse_bytes("memory", memory)
        self._pool = PrefixPool(block_size, num_blocks, memory, offload, self._rates)
        self._counts = dict.fromkeys(_COUNTED, 0)
        names = list(inspect.signature(model.forward).parameters)
        handles = [
            model.register_forward_pre_hook(ForwardHook(self, names, PrefixCache._before), with_kwargs=True),
            model.register_forward_hook(
                ForwardHook(self, names, PrefixCache._after), with_kwargs=True, always_call=True
            ),
        ]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    def __deepcopy__(self, memo):
        return self  # copies of a cache share the stored prefixes

    def clear(self) -> None:
        """Forgets everything and frees the memory. Caches in use find and store nothing until they are empty."""
        with self._lock:
            self._pool.forget()
            self._clears += 1

    def stats(self) -> dict[str, int]:
        """Counts since this object was made, and the state of the pool.

        `hits`, `misses`: sequences whose beginning was stored and cut, and others that were looked up. `bypassed`:
        sequences that were not looked up. `prompt_tokens`: tokens of forwards that were looked up, `skipped_tokens`:
        those of them that did not run. `pool_hits`, `host_hits`, `disk_hits`: blocks that were copied from each tier,
        and `recomputed_tokens`, those that ran again as that was faster than reading them (not among the skipped ones).
        `evicted_blocks`: those that left the pool. Now: `num_blocks`, `used_blocks`, and `bytes` of the pool and
        of what lies outside it; a pool sized by `memory` has no blocks before the first forward. `host_blocks`,
        `host_bytes`, `disk_blocks`, `disk_bytes`: in use there.
        """
        return {**self._counts, **self._pool.stats()}

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens looked up that did not run, 0 to 1."""
        return self._counts["skipped_tokens"] / max(1, self._counts["prompt_tokens"])

    def check(self, config, block_size: int, kv_format: str) -> None:
        """Raises ValueError when a PagedCache with these arguments cannot share its blocks."""
        if config.get_text_config(decoder=True) is not self._config:
            raise ValueError(
                "prefix_cache: made for another model. Give PagedCache the config object of the model that the "
                "PrefixCache was made for (model.config)"
            )
        for name, given, own in (("block_size", block_size, self.block_size), ("kv_format", kv_format, self.kv_format)):
            if given != own:
                raise ValueError(f"{name}={given!r} with a prefix_cache of {name}={own!r}: must be the same")

    def _before(self, model, cache, inputs: dict) -> dict | None:
        """Before a forward of `inputs`: restores what is stored of its tokens. Returns the inputs that are left, None
        for all."""
        state, tokens = cache.state, cache.row_tokens
        tokens.restored = None
        begins, plain = state.columns == 0, not model.training and is_plain(inputs, state.columns)
        limit = columns_to_skip(model, inputs) if plain and state.decode_plan is None else 0
        if begins or limit > 0:
            key = ModelKey(model)
            if begins:
                tokens.key, tokens.clears = key, self._clears
            same = tokens.key is not None and tokens.key.digest == key.digest
        else:
            same = tokens.key is not None and tokens.key.still_holds(model)
        tokens.is_plain = plain and same and tokens.key.is_shared and tokens.clears == self._clears
        new = self._new_tokens(cache, inputs) if tokens.is_plain and limit > 0 else None
        if self._rates is not None:
            tokens.started = self._rates.clock()
        if tokens.is_recomputing:
            return None
        if new is None:
            if begins and inputs.get("input_ids") is not None:
                self._counts["bypassed"] += len(inputs["input_ids"])
            return None
        if begins and self._pool.lower is not None and (columns := self._columns_to_recompute(cache, limit, *new)):
            return self._recompute(model, cache, inputs, columns)
        with self._lock:
            return self._cut(cache, inputs, limit, *new)

    def _columns_to_recompute(self, cache, limit: int, marked: torch.Tensor, valid: torch.Tensor) -> int:
        """How many leading columns are stored and run faster than they are read."""
        if not bool(valid.all()):
            return 0
        with self._lock:
            found = [self._pool.tree.match(cache.row_tokens.key.digest, sequence) for sequence in marked.tolist()]
        tiers = [[node.tier for node in nodes] for nodes in zip(*found)][: limit // self.block_size]
        return self._rates.leading_blocks(tiers, self.block_size, self._pool.lower.block_bytes) * self.block_size

    def _recompute(self, model, cache, inputs: dict, columns: int) -> dict:
        """Runs the first `columns`, then restores what is stored of the others. Returns the inputs that are left."""
        state, tokens = cache.state, cache.row_tokens
        first, rest = _parted(inputs, columns)
        tokens.is_recomputing = True
        try:
            model(**first)
        finally:
            tokens.is_recomputing = False
        batch = len(inputs["input_ids"])
        for name, number in (
            ("hits", batch),
            ("prompt_tokens", batch * columns),
            ("recomputed_tokens", batch * columns),
        ):
            self._counts[name] += number
        try:
            left = self._before(model, cache, rest)
        finally:
            restored = 0 if tokens.restored is None else tokens.restored.columns
            tokens.restored = Restored(columns + restored, True, state.num_forwards)
        return rest if left is None else left

    def _new_tokens(self, cache, inputs: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
        """int64 [B, S] from `mark_tokens` and bool [B, S], which columns are tokens; None when some ids are unknown."""
        state, tokens, mask = cache.state, cache.row_tokens, inputs.get("attention_mask")
        starts = state.pool.lengths
        if starts and (len(starts) != len(inputs["input_ids"]) or starts != tokens.lengths):
            return None
        valid, seen = None, mask
        if state.reads_pages and mask is not None:
            valid, seen = mask[:, state.columns :].bool().cpu(), None
        starts = starts or [0] * len(inputs["input_ids"])
        marked = mark_tokens(inputs["input_ids"], inputs.get("position_ids"), valid, seen, starts, state.columns).cpu()
        valid = torch.ones_like(marked, dtype=torch.bool) if valid is None else valid
        if bool((marked[valid] == UNKNOWN).any()) or any(UNKNOWN in sequence for sequence in tokens.read()):
            return None
        return marked, valid

    def _cut(self, cache, inputs: dict, limit: int, marked: torch.Tensor, valid: torch.Tensor) -> dict | None:
        """Restores as many columns as are stored of every sequence, at most `limit`."""
        state, tokens, mask, size = cache.state, cache.row_tokens, inputs.get("attention_mask"), self.block_size
        batch = len(marked)
        held = tokens.read() or [[]] * batch
        starts = [len(sequence) for sequence in held]
        found = [self._pool.tree.match(tokens.key.digest, held[b] + marked[b][valid[b]].tolist()) for b in range(batch)]
        stored = torch.tensor([max(0, len(blocks) * size - start) for blocks, start in zip(found, starts)])
        columns = min(limit, int((valid.cumsum(1) <= stored[:, None]).sum(1).min()))
        counts = valid[:, :columns].sum(1).tolist()
        self._counts["prompt_tokens"] += int(valid.sum())
        if not any(starts):
            self._counts["hits"] += sum(count > 0 for count in counts)
            self._counts["misses"] += sum(count == 0 for count in counts)
        if not any(counts):
            return None

        layers, was_empty = cache._paged_layers, not state.pool.lengths
        if any(layer.is_initialized and form_of(layer) != form for layer, form in zip(layers, self._pool.forms)):
            return None
        mask = None if mask is None else mask[:, : state.columns + columns]
        for layer, (form, device) in zip(layers, self._pool.forms):
            dtype, key_heads, key_dim, value_heads, value_dim = form
            like = torch.empty(batch, key_heads + value_heads, 0, key_dim + value_dim, dtype=dtype, device=device)
            key_value = like[:, :key_heads, :, :key_dim], like[:, :value_heads, :, :value_dim]
            layer.fix_pools(*key_value)
            layer.prepare(layer.join_plan(batch, columns, mask), *key_value)
        tokens.restored = Restored(columns, was_empty, state.num_forwards)
        places, settled = {}, settled_tokens(layers, starts)  # block of the cache -> node
        for b, (start, count, table) in enumerate(zip(starts, counts, state.pool.tables)):
            if count:
                places.update((table[p], found[b][p]) for p in range(settled[b] // size, -(-(start + count) // size)))
        for name, blocks in zip(("pool", *LOWER), self._pool.give(layers, places)):
            self._counts[f"{name}_hits"] += blocks
        for number, layer in enumerate(layers):
            beginnings = [nodes[0].beginning[number] if count else None for nodes, count in zip(found, counts)]
            layer.store.resume(state.pool.lengths, beginnings)
        tokens.append(starts, state.pool.lengths, marked[:, :columns], valid[:, :columns])
        tokens.read()  # these are on the CPU, and those of forwards need not be
        self._counts["skipped_tokens"] += sum(counts)
        if any(node.tier for node in places.values()):  # what was used comes back to the pool
            self._pool.store(cache, {b: sequence for b, sequence in enumerate(tokens.read()) if counts[b]})
        return _parted(inputs, columns)[1]

    def _after(self, model, cache, inputs: dict, output) -> None:
        """After a forward of `inputs`, what `_before` restored left out: stores the blocks that became complete.

        output: None when the forward raised.
        """
        if output is None:
            return self._undo(cache)
        state, tokens, plan = cache.state, cache.row_tokens, cache.state.plan
        if (
            plan is None
            or plan.lengths == tokens.lengths
            or any(x.num_forwards != state.num_forwards for x in cache._paged_layers)
        ):
            return  # nothing was appended, or not by all layers
        if self._rates is not None:
            self._measure(model, tokens, plan)
        marked = None
        if tokens.is_plain and inputs["input_ids"].shape[1] == plan.width:
            seen = None if state.reads_pages else inputs.get("attention_mask")
            arguments = inputs["input_ids"], inputs.get("position_ids"), plan.valid, seen
            marked = mark_tokens(*arguments, plan.starts, state.previous_columns)
        tokens.append(plan.starts, plan.lengths, marked, plan.valid)
        size = self.block_size
        complete = [b for b, (start, end) in enumerate(zip(plan.starts, plan.lengths)) if start // size < end // size]
        if complete and tokens.key is not None:
            sequences = tokens.read()
            with self._lock:
                if tokens.clears == self._clears:
                    self._pool.store(cache, {b: sequences[b] for b in complete})

    def _measure(self, model, tokens, plan) -> None:
        """Notes what the forward took, where it is long enough to tell the speed of prompts."""
        new = [end - start for start, end in zip(plan.starts, plan.lengths)]
        if plan.width >= _MEASURED_TOKENS and min(new) == plan.width:
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            seconds = (self._rates.clock() - tokens.started) / len(new)
            self._rates.computed(sum(plan.starts) // len(new), plan.width, seconds)

    def _undo(self, cache) -> None:
        """Takes back what was restored for a forward that raised before any layer appended to it."""
        state, restored, cache.row_tokens.restored = cache.state, cache.row_tokens.restored, None
        if restored is None or state.pending is not None:
            return
        if restored.num_forwards == state.num_forwards:
            cache.reset() if restored.was_empty else cache.crop(-restored.columns)


def _parted(inputs: dict, columns: int) -> tuple[dict, dict]:
    """The inputs of a forward of the first `columns` columns, of an empty cache, and of one of those after them."""
    first, rest = dict(inputs), dict(inputs)
    for name in ("input_ids", "position_ids", "cache_position", "attention_mask"):
        if inputs.get(name) is not None:
            first[name] = inputs[name][..., :columns]
            rest[name] = inputs[name] if name == "attention_mask" else inputs[name][..., columns:]
    return first, rest
