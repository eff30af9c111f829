"""How attention finds the pages: `update` attaches a `PageHandle` to the new keys, which attends over the pages."""

import torch

from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan


PAGES = "_hf_efficient_pages"  # the attribute of a key tensor that holds its PageHandle
NO_MASK = "_hf_efficient_no_mask"  # the attribute of what `no_mask` returns


def no_mask() -> torch.Tensor:
    """A mask that says nothing, for captured forwards of models that make one of ones, as long as the cache, where they
    are given none. transformers passes on masks of 4 dimensions as they are."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    setattr(mask, NO_MASK, True)
    return mask


class PageHandle:
    """What `update` hands to the paged attention instead of all keys and values.

    The first attention call writes the new tokens, since only it knows the mask. Later calls (layers that share keys
    and values) only read.

    written: whether the first call came. value: the values that it wrote.
    """

    __slots__ = ("layer", "plan", "written", "value")

    def __init__(self, layer):
        self.layer = layer
        self.plan: ForwardPlan | None = None
        self.written = False
        self.value = None

    def attend(
        self, query, key, value, attention_mask, *, softmax_scale, causal, window_size, softcap, s_aux,
        distance_bias=None,
    ):  # fmt: skip
        """Attention of `query` [B, Hq, S, D] over the blocks, after writing `key`, `value` [B, Hk, S, D] there.

        distance_bias: [1, Hq, n], in a decode step on a CPU: what each distance, up to n - 1, adds to the scores.

        Returns [B, S, Hq, Dv]; zeros at padding. Raises RuntimeError when a later call comes with other values.
        """
        layer, new, state = self.layer, not self.written, self.layer.state
        options = dict(
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, s_aux=s_aux
        )
        self.written = True
        if new:
            state.pending, self.value = None, value
        elif not torch.compiler.is_compiling() and value is not self.value:
            raise RuntimeError(
                f"layer {layer.layer_idx} attends to one set of keys with several values: a PagedCache stores the "
                'first only. Use attn_implementation="sdpa"'
            )
        if state.decode_plan is not None:  # touches nothing but tensors from here on, because it may be compiled
            state.decode_plan.check(key.shape[0], key.shape[2], attention_mask)
            if state.decode_plan.tree_mask is not None:
                options["tree_mask"] = state.decode_plan.tree_mask
            if distance_bias is not None:
                options["alibi_slopes"] = distance_bias
            if state.decode_plan.query_starts is not None:
                starts = state.decode_plan.query_starts
                return layer.store.append_and_attend_packed(layer.tables, starts, query, key, value, **options)
            return layer.store.append_and_attend(layer.tables, query, key if new else None, value, **options)
        state.see(window_size)
        if new:
            self.plan = layer.join_plan(key.shape[0], key.shape[2], attention_mask)
            layer.prepare(self.plan, key, value)
        output = layer.store.attend(self.plan, state.tables_on, query, key if new else None, value, **options)
        if layer.layer_idx == state.last_layer:
            self.plan.forget_tensors()
        return output
