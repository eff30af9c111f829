"""What the kernels of this folder must compute, in plain torch and float32, one sequence at a time. Slow on purpose.

Every function has the signature of the kernel function without `_reference`; results come back in the dtype of `q`.
"""

import torch


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """One sequence: q [Sq, Hq, D], k [Sk, Hk, D], v [Sk, Hk, Dv], visible bool [Sk] -> float32 [Sq, Hq, Dv].

    Query i stands at position i + Sk - Sq (bottom-right aligned) and sees key j when
    position - left <= j <= position + right; `causal` makes right 0 and -1 means no limit. A query that sees no key gives 0.
    """
    queries, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), k) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window_size[0], 0 if causal else window_size[1]
    position = torch.arange(queries, device=q.device)[:, None] + keys - queries
    key = torch.arange(keys, device=q.device)[None, :]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if left >= 0:
        mask &= key >= position - left
    if right >= 0:
        mask &= key <= position + right
    if visible is not None:
        mask &= visible
    scores = scores.masked_fill(~mask, float("-inf"))
    if s_aux is None:
        s_aux = torch.full((q.shape[1],), float("-inf"), device=q.device)
    scores = torch.cat([scores, s_aux.float()[:, None, None].expand(-1, queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1].masked_fill(~mask, 0.0)
    return torch.einsum("hij,jhd->ihd", weights, v)


def flash_attn_func_reference(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    """q [B, Sq, Hq, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv] -> [B, Sq, Hq, Dv]."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    for row in range(q.shape[0]):
        out[row] = attention_reference(q[row], k[row], v[row], softmax_scale, causal, window_size, softcap, s_aux)
    return out


def gather_pages(cache, block_table, length):
    """The first `length` entries of one row: cache [num_blocks, block_size, Hk, D], block_table int32 [max_blocks] ->
    [length, Hk, D] and the bool [length] that is False (and the entry 0) where the table says -1."""
    block_size = cache.shape[1]
    slots = torch.arange(length, device=cache.device)
    blocks = block_table[slots // block_size].long()
    visible = blocks >= 0
    gathered = cache.new_zeros((length, *cache.shape[2:]))
    gathered[visible] = cache[blocks[visible], (slots % block_size)[visible]]
    return gathered, visible


def flash_attn_varlen_func_reference(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
    block_table=None,
):
    """q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], or pages k [num_blocks, block_size, Hk, D] with block_table
    [B, max_blocks] -> [Tq, Hq, Dv]."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row in range(len(starts_q) - 1):
        queries, keys = slice(*starts_q[row : row + 2]), slice(*starts_k[row : row + 2])
        if block_table is None:
            row_k, row_v, visible = k[keys], v[keys], None
        else:
            row_k, visible = gather_pages(k, block_table[row], keys.stop - keys.start)
            row_v, _ = gather_pages(v, block_table[row], keys.stop - keys.start)
        out[queries] = attention_reference(
            q[queries], row_k, row_v, softmax_scale, causal, window_size, softcap, s_aux, visible
        )
    return out


def flash_attn_with_kvcache_reference(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    s_aux=None,
):
    """q [B, Sq, Hq, D], k_cache [num_blocks, block_size, Hk, D], v_cache [..., Dv], k and v [B, Sn, Hk, D or Dv] appended
    in place, cache_seqlens [B], block_table [B, max_blocks] (None: row b is block b) -> [B, Sq, Hq, Dv]."""
    if block_table is None:
        block_table = torch.arange(q.shape[0], device=q.device)[:, None]
    block_size = k_cache.shape[1]
    out = q.new_zeros((*q.shape[:-1], v_cache.shape[-1]))
    for row, length in enumerate(cache_seqlens.tolist()):
        if length < 0:
            continue
        for new in range(0 if k is None else k.shape[1]):
            block = int(block_table[row, length // block_size])
            if block >= 0:
                k_cache[block, length % block_size] = k[row, new]
                v_cache[block, length % block_size] = v[row, new]
            length += 1
        row_k, visible = gather_pages(k_cache, block_table[row], length)
        row_v, _ = gather_pages(v_cache, block_table[row], length)
        out[row] = attention_reference(
            q[row], row_k, row_v, softmax_scale, causal, window_size, softcap, s_aux, visible
        )
    return out


def reshape_and_cache_reference(k, v, k_cache, v_cache, slot_mapping):
    """k [T, Hk, D] and v [T, Hk, Dv] written in place to slot block * block_size + offset; slot -1 is skipped."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = k[token]
            v_cache[slot // k_cache.shape[1], slot % k_cache.shape[1]] = v[token]
