"""In captures on a GPU, the rotary embedding of queries and keys and the write into the pages are one kernel."""

from typing import NamedTuple

import torch

from hf_efficient.kernels.attention import ops
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.replay.operator_fusion import fuses
from hf_efficient.kernels.replay.operators import Operator, Operators


NAME = "rotary_attn_with_kvcache"
_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


def _cpu(cos, sin, q, k_cache, v_cache, k, *others):
    rotate = ops._triton().rotate_reference
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return ops.OPS.flash_attn_with_kvcache(q, k_cache, v_cache, k, *others)


def _cuda(cos, sin, *args):
    return ops.attend_with_kvcache_cuda(AttentionCall(*args), rotary_cos=cos, rotary_sin=sin)


_LIBRARY.define(
    NAME + ops.SCHEMAS["flash_attn_with_kvcache"].replace("(", "(Tensor cos, Tensor sin, ", 1),
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl(NAME, _cpu, "CPU")
_LIBRARY.impl(NAME, _cuda, "CUDA")
torch.library.register_fake(
    f"hf_efficient::{NAME}", lambda cos, sin, *args: ops.fake(AttentionCall(*args)), lib=_LIBRARY
)


@fuses(0)
def rotations(operators: Operators) -> None:
    """Attention that appends keys to pages as they are, of queries and keys rotated by the same angles just before."""
    for attention in [o for o in operators.list if o.name == "hf_efficient::flash_attn_with_kvcache"]:
        q, k_cache, v_cache, k, *others = attention.args
        if k is None or k_cache.dtype != q.dtype or q.shape[1] != k.shape[1]:
            continue
        queries, keys = _rotation(operators, q), _rotation(operators, k)
        if queries is None or keys is None or queries.cos is not keys.cos or queries.sin is not keys.sin:
            continue
        parts = [*queries.parts, *keys.parts]
        if not operators.are_private(parts, readers=[attention]):
            continue
        q, k = (operators.view(torch.ops.aten.transpose.int, each.x, 1, 2) for each in (queries, keys))
        args = queries.cos, queries.sin, q, k_cache, v_cache, k, *others
        func = getattr(ops.OPS, NAME).default
        operators.replace([*parts, attention], func, args, attention.results, at=attention)


class _Rotation(NamedTuple):
    """x [B, H, S, D], cos and sin [B or 1, S, D], and the operators that rotate x."""

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    parts: list[Operator]


def _rotation(operators: Operators, rotated: torch.Tensor) -> _Rotation | None:
    """rotated [B, S, H, D] as the transpose of x * cos + cat(-x[half:], x[:half]) * sin."""

    def made(x, name: str) -> Operator | None:
        operator = operators.made_by(x, f"aten::{name}")
        return operator if operator is None or not operator.kwargs else None

    turn = made(rotated, "transpose.int")
    last = turn and made(turn.args[0], "add.Tensor")
    straight, turned = (last and made(x, "mul.Tensor") for x in (last.args if last else (None, None)))
    halves = straight and turned and made(turned.args[0], "cat")
    minus = halves and len(halves.args[0]) == 2 and made(halves.args[0][0], "neg")
    high, low = minus and made(minus.args[0], "slice.Tensor"), halves and made(halves.args[0][1], "slice.Tensor")
    cosine, sine = (part and made(part.args[1], "unsqueeze") for part in (straight, turned))
    if not (high and low and cosine and sine):
        return None
    x, cos, sin = straight.args[0], cosine.args[0], sine.args[0]
    half, size = x.shape[-1] // 2, x.shape
    is_whole = (
        x.dim() == 4 and tuple(turn.args[1:]) == (1, 2) and halves.args[1:] in ((-1,), (3,))
        and high.args[0] is x and low.args[0] is x and high.args[1:3] in ((3, half), (-1, half))
        and low.args[1:4] in ((3, 0, half), (-1, 0, half)) and high.result.shape == low.result.shape
        and cosine.args[1] == sine.args[1] == 1 and x.dtype == cos.dtype == sin.dtype == rotated.dtype
        and all(tuple(t.shape) in ((size[0], size[2], size[3]), (1, size[2], size[3])) for t in (cos, sin))
        and cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(-1) == x.stride(-1) == 1
    )  # fmt: skip
    parts = [turn, last, straight, turned, halves, minus, high, low]
    return _Rotation(x, cos, sin, parts) if is_whole else None
