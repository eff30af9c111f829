"""`AttentionCall`: the arguments of one attention op in one record."""

from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class AttentionCall:
    """The arguments of the op `flash_attn_with_kvcache`, in the order of its schema: `AttentionCall(*args)`.

    The fields mean what the arguments of `api.flash_attn_with_kvcache` mean; left, right: its window_size, -1 for no
    limit. The ops without a cache use the same record, made by `without_cache`.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    block_table: torch.Tensor | None
    softmax_scale: float | None
    causal: bool
    left: int
    right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None
    return_lse: bool
    tree_mask: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_min: torch.Tensor | None = None
    v_min: torch.Tensor | None = None
    k_tail: torch.Tensor | None = None
    v_tail: torch.Tensor | None = None
    quantized_seqlens: torch.Tensor | None = None

    @classmethod
    def without_cache(cls, q, k, v, block_table, *options) -> "AttentionCall":
        """A call that appends nothing. options: the fields from softmax_scale to return_lse."""
        return cls(q, k, v, None, None, None, block_table, *options)

    @property
    def value_dim(self) -> int:
        """Channels of a value head; packed pages hold fewer numbers than that, rings and other pages as many."""
        return (self.v_cache if self.v_tail is None else self.v_tail).shape[-1]

    def scoring(self) -> dict:
        """The keyword arguments that all three attention functions of `flash_paged` take."""
        return dict(
            softmax_scale=self.softmax_scale, causal=self.causal, window_size=(self.left, self.right),
            softcap=self.softcap, alibi_slopes=self.alibi_slopes, s_aux=self.s_aux,
        )  # fmt: skip

    def quantization(self) -> dict:
        """The keyword arguments by which the functions over pages are told the scales and rings of quantized caches."""
        return dict(
            k_scale=self.k_scale, v_scale=self.v_scale, k_min=self.k_min, v_min=self.v_min,
            k_tail=self.k_tail, v_tail=self.v_tail, quantized_seqlens=self.quantized_seqlens,
        )  # fmt: skip
