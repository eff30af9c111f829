"""Quantized pages: what all formats share, and the 8-bit ones, with a scale for each token and head."""

from itertools import accumulate

import torch

from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros, to_device
from hf_efficient.cache.stores.full_precision import PageStore
from hf_efficient.kernels.attention import api, native_cpu, policy, torch_cpu
from hf_efficient.kernels.attention.pages import Pages


class QuantizedStore(PageStore):
    """A store whose pages hold codes.

    A few new tokens are appended and attended to by one op, which reads the codes. The tokens of a prompt attend to
    each other unquantized, and to earlier tokens as they come back from the pages, before they are stored.
    """

    def gather(self, block_table: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `lengths[b]` tokens of each sequence in the model's dtype, one sequence after the other.

        block_table: int32 [B, blocks]. Returns keys [sum, Hk, D] and values [sum, Hk, Dv].
        """
        starts = to_device(list(accumulate(lengths, initial=0)), torch.int32, self.device)
        return api.gather_cache(
            cu_seqlens_k=starts, dtype=self.dtype, num_tokens=sum(lengths), **self._cache(block_table)
        )

    def read(self, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self.gather(plan.block_table(self.device).int(), plan.lengths)
        return tuple(_padded(tokens, plan.lengths) for tokens in flat)

    def update(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = self._earlier_and_new(plan, key, value)
        self.write(plan, key, value)
        return tuple(_padded(tokens, plan.lengths) for tokens in flat)

    def _earlier_and_new(self, plan: ForwardPlan, key, value) -> list[torch.Tensor]:
        """As `gather`, with `key` and `value` behind the stored tokens as they are."""
        new = plan.tokens_of(key), plan.tokens_of(value)
        if not any(plan.starts):
            return list(new)
        counts = [length - start for start, length in zip(plan.starts, plan.lengths)]
        earlier = self.gather(plan.block_table(self.device).int(), plan.starts)
        return [
            torch.cat([part for pair in zip(old.split(plan.starts), more.split(counts)) for part in pair])
            for old, more in zip(earlier, new)
        ]

    def attend(self, plan: ForwardPlan, tables_on, query, key, value, **options) -> torch.Tensor:
        if self._reads_codes(plan, options["window_size"]):
            self.make_ready(plan)
            numbers = len(plan.starts) * plan.max_length * self.form.key_heads * self.form.key_dim
            if query.device.type == "cpu" and policy.dequantizes_at_once(numbers):
                if not native_cpu.serves(query.transpose(1, 2), **self._pages()):
                    return self._attend_whole(plan, query, key, value, **options)
            options["tree_mask"] = plan.tree_mask(query.device)
            return self.append_and_attend(tables_on(query.device), query, key, value, **options)
        tokens = plan.token_indices(query.device)
        if key is None:
            keys, values = self.gather(plan.block_table(self.device).int(), plan.lengths)
        else:
            keys, values = self._earlier_and_new(plan, key, value)
            self.write(plan, key, value)
        flat_query = query.transpose(1, 2).flatten(0, 1)
        output = api.flash_attn_varlen_func(
            flat_query if tokens is None else flat_query[tokens], keys, values, plan.cu_seqlens(query.device, new=True),
            plan.cu_seqlens(query.device, new=False), plan.max_new, plan.max_length, **options,
        )  # fmt: skip
        return plan.padded(output, query.shape[0], query.shape[2])

    def _attend_whole(self, plan, query, key, value, *, causal, window_size, **options):
        if key is not None:
            self._append(plan, key, value)
        keys, values = self._read_whole(plan)
        mask = plan.attention_mask(causal, window_size, query.device)
        output = torch_cpu.attend(
            query.to(keys.dtype), keys, values, mask=mask, causal=causal and mask is None and plan.width > 1, **options
        )
        return output.to(query.dtype)

    def _append(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores the new tokens of a forward without padding that is not a prompt."""
        self.write(plan, key, value)

    def _read_whole(self, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """As `read`, perhaps in float32, with meaningless finite numbers behind the end of a sequence."""
        return self.read(plan)

    def _reads_codes(self, plan: ForwardPlan, window_size: tuple[int, int]) -> bool:
        few = plan.width <= policy.MAX_DECODE_QUERIES or plan.tree is not None
        return plan.valid is None and few and any(plan.starts)


class TokenStore(QuantizedStore):
    """int8 or fp8 (E4M3): x = code * scale with one float16 scale for each token and head.

    pages: "keys", "values" int8 (or uint8, the bits of fp8) [num_blocks, block_size, Hk, D], "key_scales",
    "value_scales" float16 [num_blocks, block_size, Hk].
    """

    def __init__(self, capacity: int, block_size: int, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype):
        """dtype: int8 or float8_e4m3fn; the rest as in `PageStore`."""
        self.code_dtype = dtype
        self._viewed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        super().__init__(capacity, block_size, key, value)

    def _make_pages(self, capacity, block_size, key, value):
        storage, pages = torch.int8 if self.code_dtype == torch.int8 else torch.uint8, {}
        for name, new in (("key", key), ("value", value)):
            shape = capacity, block_size, new.shape[1]
            pages[name + "s"] = lazy_zeros(new, *shape, new.shape[3], dtype=storage)
            pages[name + "_scales"] = lazy_zeros(new, *shape, dtype=torch.float16)
        return pages

    def _cache(self, block_table):
        return dict(self._pages(), block_table=block_table)

    def _codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages "keys" and "values" in the dtype of the codes. The views are kept: a compiled forward that made
        them itself would copy all pages after writing to them."""
        stored = self.pages["keys"]
        if self._viewed is None or self._viewed[0] is not stored:
            self._viewed = stored, stored.view(self.code_dtype), self.pages["values"].view(self.code_dtype)
        return self._viewed[1:]

    def make_ready(self, plan: ForwardPlan) -> None:
        self._codes()

    def drop_pages(self) -> None:
        super().drop_pages()
        self._viewed = None

    def static_tensors(self) -> list[torch.Tensor]:
        return [*super().static_tensors(), *self._codes()]

    def _pages(self):
        keys, values = self._codes()
        return dict(k_cache=keys, v_cache=values, k_scale=self.pages["key_scales"], v_scale=self.pages["value_scales"])

    def write(self, plan: ForwardPlan, key: torch.Tensor, value: torch.Tensor) -> None:
        self.put(plan.slot_mapping(key.device), plan.tokens_of(key), plan.tokens_of(value))

    def put(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        api.reshape_and_cache(key, value, slot_mapping=slots, **self._pages())

    def _read_whole(self, plan: ForwardPlan) -> tuple[torch.Tensor, torch.Tensor]:
        table = plan.block_table(self.device)
        tokens = (pages.read(table.flatten()).unflatten(0, table.shape) for pages in Pages.of_cache(**self._pages()))
        return tuple(x.flatten(1, 2)[:, : plan.max_length].transpose(1, 2) for x in tokens)


def _padded(tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Sequences one after the other [sum, H, D] as [B, H, longest, D], zeros after each."""
    if min(lengths) == max(lengths):
        sequences = tokens.view(len(lengths), -1, *tokens.shape[1:])
    else:
        sequences = torch.nn.utils.rnn.pad_sequence(tokens.split(lengths), batch_first=True)
    return sequences.transpose(1, 2)
