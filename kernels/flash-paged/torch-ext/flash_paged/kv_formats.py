"""How quantized keys and values lie in the pages of a cache.

int8 and fp8 (E4M3): one float16 scale a token and head, x = code * scale. int4 and int2 (KIVI,
https://arxiv.org/abs/2402.02750): keys one scale and minimum a channel and group of tokens, values a token and head, x
= min + code * scale; a byte holds channels that lie D / 2 (or D / 4) apart, so that nothing is shuffled when unpacking.
"""

from typing import NamedTuple

import torch


KEY_CLIP = {4: 0.0, 2: 0.125}  # bits -> the part of a group's range that keys lose at either end: with four levels the
# error of the others, which are closer, weighs more


class QuantizedKV(NamedTuple):
    """The tensors beside quantized pages k_cache, v_cache [blocks, block_size, Hk, packed D]; absent ones are None.

    k_scale, v_scale: float16 [blocks, block_size, Hk] for 8 bits. For 4 and 2 bits k_scale, k_min are float16
    [blocks, block_size / G, Hk, D] (groups of G tokens) and v_scale, v_min [blocks, block_size, Hk, C] (C groups of
    channels), scale and minimum with the same strides, D and Dv multiples of 32 / bits; k_tail [B, R, Hk, D] and v_tail
    [B, R, Hk, Dv] hold, token t at slot t % R, the tokens of a sequence from quantized_seqlens (int32 [B]) on.
    """

    bits: int  # 8, 4 or 2
    is_float: bool  # fp8
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_min: torch.Tensor | None = None
    v_min: torch.Tensor | None = None
    k_tail: torch.Tensor | None = None
    v_tail: torch.Tensor | None = None
    quantized_seqlens: torch.Tensor | None = None
