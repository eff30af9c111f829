"""`attn_implementation="flash_paged"` for every transformers model whose attention goes through `AttentionInterface`.

Four insides of transformers have no registry: `_lazy_imports` resolves every attention name with "flash" in it, some
models redirect every such name to a kernel of the Hub, `_active_collector` knows whether attention weights are asked
for, and the look-up of attention functions by name is wrapped for `over_pages`. Continuous batching and compiling have
their own files.
"""

import functools

import torch

from hf_efficient.cache import weight_versions
from hf_efficient.cache.over_pages import is_over_pages
from hf_efficient.cache.page_handle import PAGES
from hf_efficient.integrations import transformers_compat, transformers_compile
from hf_efficient.integrations import transformers_continuous_batching as continuous_batching
from hf_efficient.integrations import transformers_masks as masks
from hf_efficient.kernels.attention import api, torch_cpu


def flash_paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache=None,
    request_pages=None,
    position_bias: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls.

    Keys marked by a `PagedCache` are read from its blocks, those of continuous batching from transformers' pages. All
    others go through transformers' handling of padding and packed sequences, which calls `kernels.attention.api`.

    Args:
        query, key, value: [B, Hq, S, D], [B, Hk, n, D], [B, Hk, n, Dv].
        attention_mask: bool [B, n], None, or what `flash_paged_mask` made.
        position_bias: [1, Hq, n], what each distance adds to the scores, in a decode step over a `PagedCache` on a CPU.
            Cross attention over pages has none, whatever is given.

    Returns:
        ([B, S, Hq, Dv], None).

    Raises:
        ValueError: attention weights, attention dropout or a mask that is not 2-D are asked for.
        RuntimeError: gradients are asked for and the keys lie in pages.
    """
    attention_mask, seen, starts = masks.columns_of(None if request_pages is not None else attention_mask)
    _refuse(attention_mask, dropout, kwargs)
    is_causal = module.is_causal if is_causal is None else is_causal
    query, key_, value = _same_dtype(query, key, value)
    if not is_causal and sliding_window and sliding_window == getattr(module.config, "sliding_window", None):
        # transformers' bidirectional masks see up to distance sliding_window, flash attention less than that: models
        # pass it one more, but T5Gemma forgets.
        sliding_window += 1
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    unmasked = dict(softmax_scale=scaling, softcap=softcap or 0.0, s_aux=s_aux)
    options = dict(**unmasked, causal=is_causal, window_size=window)
    if request_pages is not None:
        return request_pages.attend(module.layer_idx, query, key_, value, **options), None
    handle = getattr(key, PAGES, None)
    if handle is not None:
        api.check_inputs(query.transpose(1, 2), key_.transpose(1, 2), value.transpose(1, 2), dropout)
        if not handle.written and seen is None:
            _refuse_packed(kwargs.get("position_ids"), query, handle)
        elif not handle.written:
            _refuse_padding(attention_mask, sliding_window, query.shape[2], handle)
        if position_bias is not None and is_causal:
            options["distance_bias"] = _distance_bias(position_bias, handle)
        output = handle.attend(query, key_, value, attention_mask, **options)
        if seen is not None:
            output = _with_trailing_padding(output, query, attention_mask, handle, unmasked)
        return output.contiguous(), None
    if position_bias is not None:
        raise ValueError('position_bias: flash_paged adds none to its scores; use attn_implementation="sdpa"')
    if seen is not None:
        output = torch_cpu.attend(query, key_, value, mask=torch_cpu.additive(seen[:, 0]), **unmasked)
        return output.contiguous(), None
    paged_attention_cache = _transformers()[1]
    if isinstance(cache, paged_attention_cache):
        output = continuous_batching.attend_pages(cache, module.layer_idx, query, key_, value, **options, **kwargs)
        if output is not None:
            return output, None
        new = dict(key_states=key_, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        key_, value = paged_attention_cache.update(cache, **new)  # that of `FormattedCache` waits for this call
    name = module.config._attn_implementation
    kwargs |= dict(dropout=dropout, softcap=softcap, sliding_window=sliding_window)
    kwargs["attn_implementation"] = name if name in api.ATTENTION_NAMES else api.ATTENTION_NAMES[0]
    return _attend_contiguous(query, key_, value, attention_mask, starts, options, kwargs), None


def _attend_contiguous(query, key, value, attention_mask, starts, options: dict, kwargs: dict) -> torch.Tensor:
    """Attention [B, S, Hq, Dv] over keys that lie in no pages. starts: cu_seqlens of packed sequences, where they are
    known. options: of `kernels.attention.api`. kwargs: of transformers' function that unpads."""
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is None and not torch.compiler.is_compiling():
        positions = kwargs.pop("position_ids", None)
        if starts is None and key.shape[2] == query.shape[2] and len(query) == 1:
            starts = masks.row_starts(positions, query.shape[2])
        if starts is not None:
            return _attend_packed(query, key, value, starts, **options)
    if attention_mask is not None and not options["causal"] and kwargs["sliding_window"] is None:
        return _attend_all_queries(query, key, value, attention_mask, **options)
    return _transformers()[0]._flash_attention_forward(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attention_mask,
        query_length=query.shape[2],
        is_causal=options["causal"],
        softmax_scale=options["softmax_scale"],
        s_aux=options["s_aux"],
        **kwargs,
    )


def _distance_bias(position_bias: torch.Tensor, handle) -> torch.Tensor:
    """`position_bias` as a decode step takes it. Raises ValueError for that of a whole forward."""
    if position_bias.dim() == 3 and handle.layer.state.decode_plan is not None:
        return position_bias
    raise ValueError(
        f"position_bias of shape {tuple(position_bias.shape)}: over the pages of a cache flash_paged adds the bias of "
        'T5 in captured forwards alone; use attn_implementation="sdpa"'
    )


def _attend_all_queries(query, key, value, mask, **options):
    """Attention under a `mask` [B, n] of keys alone, as cross attention to a padded encoder has it.

    transformers drops the queries where that mask is 0, as if it were theirs too, and so loses tokens of the decoder.
    """
    batch, width, length = query.shape[0], query.shape[2], mask.shape[1]
    query, key, value = query.transpose(1, 2), key.transpose(1, 2)[:, :length], value.transpose(1, 2)[:, :length]
    key, indices, starts, longest, _ = _transformers()[0]._unpad_input(key, mask)
    firsts = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=query.device)
    output = api.flash_attn_varlen_func(
        query.flatten(0, 1), key, value.flatten(0, 1)[indices], firsts, starts, width, longest, **options
    )
    return output.unflatten(0, (batch, width))


def _attend_packed(query, key, value, starts, **options):
    """Attention in which each sequence of a row sees itself alone. starts: cu_seqlens of all rows."""
    batch, longest = query.shape[0], int(starts.diff().max())
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    output = api.flash_attn_varlen_func(query, key, value, starts, starts, longest, longest, **options)
    return output.unflatten(0, (batch, -1))


def _refuse(attention_mask, dropout, kwargs) -> None:
    """Raises ValueError for attention weights, dropout and masks that flash_paged does not have."""
    # Some models do not pass output_attentions on. Then transformers' collector knows, which torch.compile cannot
    # trace.
    wanted = kwargs.get("output_attentions")
    if not wanted and not torch.compiler.is_compiling():
        wanted = any(name.endswith("attentions") for name in _transformers()[2].get() or ())
    if wanted:
        raise ValueError(
            'output_attentions=True: flash_paged never holds the attention weights; use attn_implementation="eager"'
        )
    if dropout:
        raise ValueError(
            f"attention dropout {dropout}: flash_paged has none; call model.eval(), or train with "
            'attn_implementation="sdpa"'
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask with {attention_mask.dim()} dimensions: flash_paged takes 2-D masks (batch, length); use "
            'attn_implementation="sdpa" for others'
        )


def _with_trailing_padding(output, query, columns, handle, options):
    """`output` [B, S, Hq, Dv], and for queries in padding behind a sequence's last token the attention to all its
    tokens.

    "sdpa" gives that too, and `generate()` takes the next token from the last column even where it is padding.
    """
    trailing = _trailing(columns, query.shape[2])
    if not bool(trailing.any()):
        return output
    keys, values = handle.layer.store.read(handle.plan)
    lengths = torch.tensor(handle.plan.lengths, device=keys.device)
    seen = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
    mask = torch_cpu.additive(seen[:, None].expand(-1, query.shape[2], -1))
    behind = torch_cpu.attend(query, keys, values, mask=mask, **options)
    return torch.where(trailing[..., None, None], behind, output)


def _trailing(columns: torch.Tensor, width: int) -> torch.Tensor:
    """bool [B, width]: which of the last columns are padding behind a sequence's last token."""
    columns = columns.bool()
    last = columns.shape[1] - 1 - columns.flip(1).int().argmax(1)  # token of each sequence
    column = torch.arange(columns.shape[1], device=columns.device)
    return ((column > last[:, None]) & columns.any(1, keepdim=True))[:, -width:]


def _same_dtype(query, key, value):
    """All in the dtype of the values: rotary embeddings and norms in float32 leave queries and keys in float32."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    return query.to(value.dtype), key.to(value.dtype), value


def _refuse_padding(attention_mask, sliding_window: int | None, queries: int, handle) -> None:
    """Raises ValueError for padding elsewhere than at the left that the pages of a cache cannot represent."""
    if sliding_window is not None:
        raise ValueError(
            f"attention_mask: padding stands elsewhere than at the left, and a window of {sliding_window} columns "
            "counts it, which the pages of a PagedCache do not hold. Pad on the left alone, or use "
            'attn_implementation="sdpa"'
        )
    if handle.layer.evicts and bool(_trailing(attention_mask, queries).any()):
        raise ValueError(
            "attention_mask: padding stands behind the tokens, and a PagedCache(eviction=...) computes no logits "
            "there, from which generate() takes the next token. Pad on the left alone"
        )


def _refuse_packed(position_ids, query, handle) -> None:
    """Raises ValueError for several sequences packed into one, which would see each other in a cache. Looks once a
    forward, at the first layer of each group: on an accelerator that waits for the device."""
    if query.shape[0] != 1 or query.shape[2] == 1 or position_ids is None or position_ids.dim() != 2:
        return
    state = handle.layer.state
    if handle.layer.num_forwards != state.num_forwards:  # another layer has begun this forward
        return
    # the positions of a decode step are the cache's own, and reading them breaks a graph; those of a tree may decrease
    if state.decode_plan is not None or state.tree is not None:
        return
    if bool((position_ids[:, 1:] < position_ids[:, :-1]).any()):
        raise ValueError(
            "position_ids restart, so several sequences are packed into one row: a PagedCache keeps one sequence per "
            "row. Use use_cache=False, or a batch."
        )


def _transformers():
    return _import() if torch.compiler.is_compiling() else _imported()  # dynamo warns of functools.cache


def _import():
    from transformers import modeling_flash_attention_utils
    from transformers.generation.continuous_batching import PagedAttentionCache
    from transformers.utils import output_capturing

    return modeling_flash_attention_utils, PagedAttentionCache, output_capturing._active_collector


_imported = functools.cache(_import)


def register() -> None:
    """Registers the attention under its names. Idempotent; transformers.modeling_utils must be imported or importable.

    Raises ImportError when transformers lacks an inside that this needs, naming the versions that have it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    for file in ("attention", "compile", "continuous_batching", "masks", "paged_formats", "quantized_pages"):
        transformers_compat.require(f"integrations/transformers_{file}.py")
    for name in api.ATTENTION_NAMES:
        AttentionInterface.register(name, flash_paged_attention_forward)
        AttentionMaskInterface.register(name, masks.flash_paged_mask)
    if not hasattr(utils._lazy_imports, "_hf_efficient"):
        utils._lazy_imports = _answer_for_our_names(utils._lazy_imports, utils)
    for interface, stock in ((AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, sdpa_mask)):
        if "__getitem__" not in vars(interface):
            interface.__getitem__ = _look_up_over_pages(interface.__getitem__, stock)
    continuous_batching.register()
    transformers_compile.register()
    weight_versions.register()


def _look_up_over_pages(original, stock):
    """transformers' look-up of an attention or mask function by name, answered with ours inside `over_pages`.

    Only where it would answer with `stock`, its own for "sdpa": a function that a user registered under that name
    stays.
    """
    attention_of_torch = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(original)
    def __getitem__(self, key):
        function = original(self, key)
        if torch.compiler.is_compiling() or function is not stock or not is_over_pages():
            return function
        if torch.nn.functional.scaled_dot_product_attention is not attention_of_torch:
            return function
        return original(self, api.ATTENTION_NAMES[0])

    return __getitem__


def _answer_for_our_names(original, utils):
    @functools.wraps(original)
    def _lazy_imports(implementation, *args, **kwargs):
        if transformers_compat.without_prefix(implementation) in api.ATTENTION_NAMES:
            functions = api.flash_attn_func, api.flash_attn_varlen_func, api.flash_attn_with_kvcache
            return *functions, utils._pad_input, utils._unpad_input
        return original(implementation, *args, **kwargs)

    _lazy_imports._hf_efficient = True
    return _lazy_imports
