"""The gradients of attention without pages: checks of the arguments, and the launch. Dtypes, shapes, options and errors
are those of interface.py."""

import operator

import torch

from .backward import attend_backward
from .checks import check_attention, check_device, check_integers, check_options, check_tensor
from .debug_checks import check_cumulative


def flash_attn_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    grad_lse: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, s_aux: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and s_aux (None without sinks) of `flash_attn_func`, or with cu_seqlens of
    `flash_attn_varlen_func` without pages, in their shapes and dtypes. Deterministic.

    grad_out: of the output, in its shape and dtype. out, lse: what the forward gave. grad_lse: of the log-sum-exp,
    float32 in its shape. max_seqlen_q, max_seqlen_k: with cu_seqlens, the longest of the lengths or more. All else is
    as the forward was given it. See https://arxiv.org/abs/2307.08691, algorithm 2.
    """
    check_device(q)
    packed = cu_seqlens_q is not None
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out), ("grad_out", grad_out)):
        check_tensor(name, tensor, 3 if packed else 4, q)
    check_attention(q, k, v)
    wanted = (*q.shape[:-1], v.shape[-1])
    for name, tensor in (("out", out), ("grad_out", grad_out)):
        if tensor.shape != wanted:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {wanted}, that of the output")
    batch = q.shape[0]
    if packed:
        check_integers("cu_seqlens_q", cu_seqlens_q, 1, q)
        check_integers("cu_seqlens_k", cu_seqlens_k, 1, q, length=cu_seqlens_q.shape[0])
        batch = cu_seqlens_q.shape[0] - 1
        if max_seqlen_q is None or max_seqlen_k is None:
            raise ValueError("max_seqlen_q and max_seqlen_k are needed with cu_seqlens_q")
        check_cumulative("cu_seqlens_q", cu_seqlens_q, end=q.shape[0], longest=max_seqlen_q)
        check_cumulative("cu_seqlens_k", cu_seqlens_k, end=k.shape[0], longest=max_seqlen_k)
    elif k.shape[0] != batch:
        raise ValueError(f"k has batch size {k.shape[0]}, expected {batch} as q")
    shape = (q.shape[1], q.shape[0]) if packed else (batch, q.shape[2], q.shape[1])
    for name, tensor in (("lse", lse), ("grad_lse", grad_lse)):
        if (tensor is not None or name == "lse") and (
            not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != torch.float32
        ):
            given = (
                f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise ValueError(f"{name} is {given}: allowed is float32 {shape}, as the forward gives it")
    options = check_options(
        q, batch, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_lse=True
    )
    del options["return_lse"]
    longest = (max_seqlen_q, max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    return attend_backward(
        grad_out, None if grad_lse is None else grad_lse.contiguous(), q, k, v, out.contiguous(), lse.contiguous(),
        *map(operator.index, longest), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options,
    )  # fmt: skip
