"""The backward pass of causal attention in bfloat16 on a CPU, by matrix products.

torch's own kernel reaches a tenth of the processor's rate there. Here oneDNN computes the scores of some queries at a
time. No matrix [S, S] is kept: the scores are computed again (FlashAttention, https://arxiv.org/abs/2205.14135,
algorithm 4)."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_efficient.kernels.widened_products import WidenedProducts, multiplies_bfloat16


STEP = 128  # queries at once: they leave out most of the keys that they do not see
SCORES = 1 << 22  # scores at once, at most, however many heads there are
LEAST = 16  # queries at once, at least


def fast_training(device: torch.device) -> list[TorchFunctionMode]:
    """The modes inside which a model in bfloat16 trains fast on `device`."""
    if device.type != "cpu":
        return []
    return [FastAttention() if multiplies_bfloat16() else WidenedProducts()]


class FastAttention(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` goes by `CausalAttention` where that `serves` the call."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and len(args) >= 3 and serves(*args, **kwargs):
            return CausalAttention.apply(*args[:3], kwargs.get("scale"))
        return function(*args, **kwargs)


def serves(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> bool:
    """Whether this call of `scaled_dot_product_attention` is one of `CausalAttention`: q [B, Hq, S, D], k [B, Hk, S,
    D] and v [B, Hk, S, Dv] in bfloat16 on a CPU with instructions for it, every query seeing all keys up to its own."""
    if not q.dim() == k.dim() == v.dim() == 4 or not is_causal or attn_mask is not None or dropout_p:
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3]:
        return False  # torch repeats them
    same = q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.shape[2] == k.shape[2] and q.shape[2] >= LEAST
    on_cpu = q.device.type == k.device.type == v.device.type == "cpu"
    return same and on_cpu and q.shape[1] % k.shape[1] == 0 and has_bfloat16_products()


def has_bfloat16_products() -> bool:
    """Whether torch has oneDNN, and the CPU instructions with which it multiplies bfloat16."""
    return torch.backends.mkldnn.is_available() and multiplies_bfloat16()


class CausalAttention(torch.autograd.Function):
    """q [B, Hq, S, D], k [B, Hk, S, D], v [B, Hk, S, Dv], scale (None: D^-0.5) -> [B, Hq, S, Dv], by torch's kernel."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.scale = scale
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    @staticmethod
    def backward(ctx, grad):
        return *gradients(*ctx.saved_tensors, grad, ctx.scale), None


def gradients(q, k, v, grad, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of q, k and v, in their shapes and dtype, for that of the output [B, Hq, S, Dv]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = _merged(k), _merged(v)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (keys, values))
    for (part, queries), (_, above) in zip(_parts(q, k), _parts(grad, k)):
        seen = slice(part.stop)
        weights = _weights(queries, keys, part, scale)
        grad_v[:, seen] += torch.bmm(weights.to(q.dtype).transpose(1, 2), above)
        slope = torch.bmm(above, values[:, seen].transpose(1, 2)).float()
        slope = torch._softmax_backward_data(slope, weights, -1, torch.float32).mul_(scale).to(q.dtype)
        grad_q[:, :, part] = torch.bmm(slope, keys[:, seen]).view(*q.shape[:2], -1, q.shape[-1])
        grad_k[:, seen] += torch.bmm(slope.transpose(1, 2), queries)
    return grad_q, grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


def _merged(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] -> [B H, S, D]."""
    return x.flatten(0, 1).contiguous()


def _parts(x: torch.Tensor, k: torch.Tensor):
    """Slices of the queries [B, Hq, S, D] with those of them, the heads that share a key one after the other:
    [B Hk, Hq / Hk * queries, D]."""
    batch, heads, length, _ = x.shape
    step = max(LEAST, min(STEP, SCORES // (batch * heads * length)))
    for start in range(0, length, step):
        part = slice(start, min(start + step, length))
        yield part, x[:, :, part].reshape(batch * k.shape[1], -1, x.shape[-1])


def _weights(queries: torch.Tensor, keys: torch.Tensor, part: slice, scale: float) -> torch.Tensor:
    """The attention of `queries` [n, group * queries, D] of `part`, float32 [n, group * queries, part.stop]."""
    turned, width = keys[:, : part.stop].transpose(1, 2), part.stop - part.start
    rounded = torch.bmm(queries, turned)
    rest = torch.baddbmm(rounded, queries, turned, beta=-1)  # what bfloat16 could not hold of the scores
    scores = rounded.float().add_(rest).mul_(scale)
    hidden = torch.full((width, width), float("-inf"), dtype=torch.float32).triu_(1)
    scores.unflatten(1, (-1, width))[..., part.start :] += hidden
    return scores.softmax(-1)
