"""How attention finds the blocks: `update` marks the new keys with a `PageHandle`, which does the attention over them."""

from hf_efficient.cache.step import Step
from hf_efficient.kernels import attention, attention_cpu


PAGES = "_hf_efficient_pages"  # the attribute of a key tensor that holds its PageHandle
_MAX_DECODE_QUERIES = 16  # so many new columns or fewer: one kernel that appends and attends


class PageHandle:
    """What `update` hands to the paged attention instead of all keys and values. The first attention call writes the new
    tokens, since only it knows the mask; later ones (layers that share keys and values) only read."""

    __slots__ = ("layer", "step", "written")

    def __init__(self, layer):
        self.layer = layer
        self.step: Step | None = None
        self.written = False

    def attend(self, query, key, value, attention_mask, *, softmax_scale, causal, window_size, softcap, s_aux):
        """Attention of `query` [B, Hq, S, D] over the blocks, after writing `key`, `value` [B, Hk, S, D] there.
        Returns [B, S, Hq, Dv]; zeros at padding."""
        layer, new = self.layer, not self.written
        options = dict(
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, s_aux=s_aux
        )
        self.written = True
        if new:
            layer.state.pending = None
        if layer.state.planned is not None:  # nothing but tensors from here on: this may be compiled
            layer.state.planned.check(key.shape[0], key.shape[2], attention_mask)
            return self._append_and_attend(query, key if new else None, value, layer.tables, **options)
        if new:
            self.step = layer.join_step(key.shape[0], key.shape[2], attention_mask)
            layer.prepare(self.step, key, value)
        if query.device.type == "cpu":
            return self._attend_cpu(query, key if new else None, value, **options)
        return self._attend_kernels(query, key if new else None, value, **options)

    def _attend_cpu(self, query, key, value, *, causal, window_size, **options):
        layer, step = self.layer, self.step
        if key is not None:
            layer.write(step, key, value)
        keys, values = layer.read(step)
        mask = step.attention_mask(causal, window_size, query.device)
        return attention_cpu.attend(
            query, keys, values, mask=mask, causal=causal and mask is None and step.width > 1, **options
        )

    def _attend_kernels(self, query, key, value, **options):
        layer, step, device = self.layer, self.step, query.device
        tables, tokens = layer.state.tables_on(device), step.token_indices(device)
        if tokens is None and step.width <= _MAX_DECODE_QUERIES:
            return self._append_and_attend(query, key, value, tables, **options)
        query = query.transpose(1, 2)  # [B, S, Hq, D]
        keys, values, table = layer.keys, layer.values, tables.block_table
        if key is not None:
            flat_key, flat_value = key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1)
            if tokens is not None:
                flat_key, flat_value = flat_key[tokens], flat_value[tokens]
            attention.reshape_and_cache(flat_key, flat_value, keys, values, slot_mapping=step.slot_mapping(device))
            if not any(step.starts):  # nothing but the new tokens to see
                keys, values, table = flat_key, flat_value, None
        flat_query = query.flatten(0, 1) if tokens is None else query.flatten(0, 1)[tokens]
        output = attention.flash_attn_varlen_func(
            flat_query, keys, values, step.cu_seqlens(device, new=True), step.cu_seqlens(device, new=False),
            step.max_new, step.max_length, block_table=table, **options,
        )  # fmt: skip
        if tokens is not None:
            padded = output.new_zeros(query.shape[0] * query.shape[1], *output.shape[1:])
            output = padded.index_copy_(0, tokens, output)
        return output.view(*query.shape[:2], *output.shape[1:])

    def _append_and_attend(self, query, key, value, tables, **options):
        """One op for forwards in which every new column is a token of its row."""
        layer, seqlens = self.layer, tables.cache_seqlens
        if key is None:
            value, seqlens = None, seqlens + query.shape[2]
        else:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        return attention.flash_attn_with_kvcache(
            query.transpose(1, 2), layer.keys, layer.values, key, value, cache_seqlens=seqlens,
            block_table=tables.block_table, **options,
        )  # fmt: skip
