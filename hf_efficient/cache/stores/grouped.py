"""int4 and int2 pages: keys quantized per channel in groups of tokens, values per token. The newest tokens and the
first ones are not quantized.

Papers: Liu et al., KIVI (https://arxiv.org/abs/2402.02750); Xiao et al., Efficient Streaming Language Models with
Attention Sinks (https://arxiv.org/abs/2309.17453), which shows that most of the attention falls on the first tokens.
"""

from itertools import accumulate

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.bookkeeping.device_tables import DeviceTables
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros, to_device
from hf_efficient.cache.stores.quantized import QuantizedStore
from hf_efficient.kernels.attention import api


WINDOW = 128  # newest tokens of a sequence that are never quantized
_RINGS = ("key_ring", "value_ring")


class GroupStore(QuantizedStore):
    """The first block and the newest tokens of a sequence lie in a ring, whole groups of the tokens between in pages.

    The attention ops read the pages first and then the ring (token t in slot t % R, from `quantized_seqlens[b]` on).
    Without a window the order of earlier tokens does not matter, so the tokens of the first block are written at the
    beginning of the ring's tokens, and again whenever a group behind them is quantized; a sequence's first page stays
    empty. Layers with a window treat the first block like all others.

    pages: "keys", "values" uint8 [num_blocks, block_size, Hk, D * bits / 8], "key_scales", "key_minima" float16
        [num_blocks, block_size / G, Hk, D], "value_scales", "value_minima" float16 [num_blocks, block_size, Hk, C]: G
        tokens, or one of C groups of channels, share a scale.
    rows: "key_ring" [B, R, Hk, D], "value_ring" [B, R, Hk, Dv], "quantized_seqlens" int32 [B].
    """

    takes_steps = True

    def __init__(
        self,
        pool: BlockPool,
        capacity: int,
        key: torch.Tensor,
        value: torch.Tensor,
        bits: int,
        group_size: int,
        has_window: bool,
    ):
        """group_size: tokens, or channels of the values, that share a scale; fewer where blocks are smaller or the head
        dim is no multiple. The other arguments as in `PageStore`."""
        self.pool, self.bits = pool, bits
        self.group = min(group_size, pool.block_size)
        dim = value.shape[3]
        self.channel_groups = max(n for n in range(1, max(1, dim // group_size) + 1) if dim % n == 0)
        self.first = 0 if has_window else pool.block_size  # tokens at the beginning of a sequence that stay as they are
        super().__init__(capacity, pool.block_size, key, value)
        # the first tokens, the newest, and room for those that are appended between two quantizations
        self.ring = self.first + WINDOW + max(2 * self.group, 32)
        self.lag = self.ring
        self.quantized = [0] * key.shape[0]  # tokens of each sequence in pages
        with torch.inference_mode(False):
            self.rows = {
                name: new.new_zeros(new.shape[0], self.ring, new.shape[1], new.shape[3])
                for name, new in zip(_RINGS, (key, value))
            }
            self.rows["quantized_seqlens"] = key.new_zeros(key.shape[0], dtype=torch.int32)

    def _make_pages(self, capacity, block_size, key, value):
        heads, dim = key.shape[1], key.shape[3]
        key_scales = capacity, block_size // self.group, heads, dim
        value_scales = capacity, block_size, heads, self.channel_groups
        pages = {
            name: lazy_zeros(new, capacity, block_size, heads, new.shape[3] * self.bits // 8, dtype=torch.uint8)
            for name, new in (("keys", key), ("values", value))
        }
        for name, shape in (("key", key_scales), ("value", value_scales)):
            for kind in ("_scales", "_minima"):
                pages[name + kind] = lazy_zeros(key, *shape, dtype=torch.float16)
        return pages

    def _pages(self):
        return dict(
            k_cache=self.pages["keys"], v_cache=self.pages["values"], k_scale=self.pages["key_scales"],
            k_min=self.pages["key_minima"], v_scale=self.pages["value_scales"], v_min=self.pages["value_minima"],
        )  # fmt: skip

    def _cache(self, block_table):
        return dict(
            self._pages(), block_table=block_table[:, self.first // self.pool.block_size :],
            k_tail=self.rows["key_ring"], v_tail=self.rows["value_ring"],
            quantized_seqlens=self.rows["quantized_seqlens"],
        )  # fmt: skip

    def gather(self, block_table, lengths):
        flat = super().gather(block_table, lengths)
        if not self.first or not any(self.quantized):
            return flat
        ends = list(accumulate(lengths, initial=0))
        pieces = []
        for start, end, done in zip(ends, ends[1:], self.quantized):
            middle = start + done
            pieces += [
                slice(middle, min(middle + self.first, end)),
                slice(start, middle),
                slice(middle + self.first, end),
            ]
        return tuple(torch.cat([tokens[piece] for piece in pieces]) for tokens in flat)

    def _reads_codes(self, plan, window_size):
        return super()._reads_codes(plan, window_size) and not self._is_out_of_order(window_size)

    def _is_out_of_order(self, window_size: tuple[int, int]) -> bool:
        """Whether a window would be counted over tokens that do not lie in their order."""
        return self.first > 0 and any(side >= 0 for side in window_size)

    def append_and_attend(self, tables: DeviceTables, query, key, value, **options):
        if self._is_out_of_order(options["window_size"]):
            raise RuntimeError(
                f"decode_step() of an int4 or int2 PagedCache: the attention has a window of {options['window_size']} "
                "in a layer that has none by the model's config"
            )
        return super().append_and_attend(tables, query, key, value, **options)

    def write(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        counts = [length - start for start, length in zip(plan.starts, plan.lengths)]
        keys, values = (plan.tokens_of(new).split(counts) for new in (key, value))
        for (start, length, done), sequences in self._alike(plan.starts, plan.lengths).items():
            if length > start:
                new = (torch.stack([tokens[sequence] for sequence in sequences]) for tokens in (keys, values))
                groups = max(0, length - self.first - WINDOW - done) // self.group
                self._advance(sequences, start, done, *new, done + groups * self.group)
        self._tell()

    def _append(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        starts = to_device(plan.starts, torch.int64, self.device)[:, None]
        slots = (starts + torch.arange(plan.width, device=self.device)) % self.ring
        sequence = torch.arange(len(starts), device=self.device)[:, None]
        for name, new in zip(_RINGS, (key, value)):
            self.rows[name][sequence, slots] = new.transpose(1, 2)

    def make_ready(self, plan: ForwardPlan) -> None:
        """Quantizes as many groups as must leave the rings for the new tokens of `plan` to fit."""
        changed = False
        for (start, length, done), sequences in self._alike(plan.starts, plan.lengths).items():
            if length - done <= self.ring:
                continue
            groups = max(start - self.first - WINDOW - done, length - self.ring - done + self.group - 1) // self.group
            if self.first + done + groups * self.group > start:
                raise ValueError(
                    f"PagedCache: {length - start} new tokens of a sequence do not fit beside what stays unquantized: "
                    f"at most {self.ring - self.first - self.group + 1} at a time in decode_step()"
                )
            nothing = (self.rows[name].new_zeros(len(sequences), 0, *self.rows[name].shape[2:]) for name in _RINGS)
            self._advance(sequences, start, done, *nothing, done + groups * self.group)
            changed = True
        if changed:
            self._tell()

    def _alike(self, starts: list[int], lengths: list[int]) -> dict[tuple[int, int, int], list[int]]:
        """(tokens before, tokens after, tokens in pages) -> the sequences that have them."""
        alike: dict = {}
        for sequence, counts in enumerate(zip(starts, lengths, self.quantized)):
            alike.setdefault(counts, []).append(sequence)
        return alike

    def _advance(self, sequences: list[int], start: int, done: int, key, value, target: int) -> None:
        """Appends key [b, n, Hk, D] and value to sequences of `start` tokens, and quantizes groups until `target`
        tokens, not `done`, are in pages."""
        index, groups = to_device(sequences, torch.int64, self.device)[:, None], []
        live = torch.arange(done, start, device=self.device) % self.ring
        for name, new in zip(_RINGS, (key, value)):
            tokens = torch.cat([self.rows[name][index, live], new], 1)
            leaving = tokens[:, self.first : self.first + target - done]
            groups.append(leaving.unflatten(1, (-1, self.group)).flatten(0, 1))
            staying = torch.cat([tokens[:, : self.first], tokens[:, self.first + target - done :]], 1)
            slots = torch.arange(target, target + staying.shape[1], device=self.device) % self.ring
            self.rows[name][index, slots] = staying
        if target > done:
            size, table, tokens = self.pool.block_size, self.pool.tables, range(done, target, self.group)
            slots = [
                (table[b][(self.first + token) // size] * size + token % size) // self.group
                for b in sequences
                for token in tokens
            ]
            api.quantize_and_cache(*groups, **self._pages(), group_mapping=to_device(slots, torch.int64, self.device))
            for sequence in sequences:
                self.quantized[sequence] = target

    def _ring_slots(self, start: int, number: int) -> torch.Tensor:
        return torch.arange(start, start + number, device=self.device) % self.ring

    def _tell(self) -> None:
        self.rows["quantized_seqlens"].copy_(to_device(self.quantized, torch.int32, self.device))

    def select(self, sequences: list[int]) -> None:
        index = to_device(sequences, torch.int64, self.device)
        with torch.inference_mode(False):
            for name, tensor in self.rows.items():
                chosen = tensor[index]
                if chosen.shape == tensor.shape:  # a captured graph reads the tensor that was there
                    tensor.copy_(chosen)
                else:
                    self.rows[name] = chosen
        self.quantized = [self.quantized[sequence] for sequence in sequences]

    def settled(self, lengths: list[int]) -> list[int]:
        return [done and self.first + done for done in self.quantized]

    def beginning(self, sequence: int) -> dict[str, torch.Tensor]:
        slots = self._ring_slots(self.quantized[sequence], self.first)
        return {name: self.rows[name][sequence, slots] for name in _RINGS}

    def resume(self, lengths: list[int], beginnings: list[dict[str, torch.Tensor] | None]) -> None:
        size = self.pool.block_size
        for sequence, (length, beginning) in enumerate(zip(lengths, beginnings)):
            if beginning is not None:
                self.quantized[sequence] = max(-(-length // size) * size - self.first, 0)
                slots = self._ring_slots(self.quantized[sequence], self.first)
                for name, tokens in beginning.items():
                    self.rows[name][sequence, slots] = tokens
        self.rewind(lengths)

    def restored(self) -> None:
        self.quantized = self.rows["quantized_seqlens"].tolist()

    def rewind(self, lengths: list[int]) -> None:
        """Tokens of a group that is cut go back into the ring, as they come back from the pages."""
        for sequence, length in enumerate(lengths):
            done = self.quantized[sequence]
            if done and length < self.first + done:
                self._unquantize(sequence, max(0, length - self.first) // self.group * self.group, length)
        self._tell()

    def _unquantize(self, sequence: int, target: int, length: int) -> None:
        done, self.quantized[sequence] = self.quantized[sequence], target
        size = self.pool.block_size
        old, new = (self._ring_slots(at, min(length, self.first)) for at in (done, target))
        for name in _RINGS:
            self.rows[name][sequence, new] = self.rows[name][sequence, old]
        number = length - self.first - target
        if number > 0:
            block, offset = divmod(self.first + target, size)
            table, ends = (
                to_device(x, torch.int32, self.device)
                for x in ([[self.pool.tables[sequence][block]]], [0, offset + number])
            )
            pages = api.gather_cache(
                block_table=table, cu_seqlens_k=ends, dtype=self.dtype, num_tokens=offset + number, **self._pages()
            )
            slots = torch.arange(self.first + target, length, device=self.device) % self.ring
            for name, tokens in zip(_RINGS, pages):
                self.rows[name][sequence, slots] = tokens[offset:]
