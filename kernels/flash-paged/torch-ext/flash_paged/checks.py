"""Checks of the public functions' arguments: every error names the argument, what was given and what is allowed."""

import torch

from .tiles import INTERPRETED


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_UNLIMITED = 2**30  # a window this wide is no window


def check_device(q: torch.Tensor) -> None:
    """Checks that tensors are on CUDA (or ROCm), or on CPU under the Triton interpreter."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    if not q.is_cuda and not (INTERPRETED and q.device.type == "cpu"):
        raise ValueError(
            f"q is on device {q.device}: flash_paged runs on CUDA and ROCm devices (on CPU only under the Triton "
            "interpreter, TRITON_INTERPRET=1 set before it is imported)"
        )


def check_tensor(name: str, tensor, dims: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Checks that `tensor` has `dims` dimensions, the device of `like` (q or k), its dtype or `dtype`, and a contiguous
    last dimension.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is {dtype}")
    if dtype is None and (tensor.dtype not in DTYPES or tensor.dtype != like.dtype):
        allowed = "float16, bfloat16 or float32, the same for all of them"
        raise TypeError(f"{name} has dtype {tensor.dtype} beside {like.dtype}: allowed are {allowed}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device} as the first tensor")
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} has head dim {tensor.shape[-1]}: allowed are 1 to {MAX_HEAD_DIM}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be contiguous (stride 1); "
            "call .contiguous()"
        )


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str] = ("k", "v")) -> None:
    """Checks that q [..., Hq, D], k [..., Hk, D] and v [..., Hk, Dv] fit each other and need no gradient."""
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{names[0]} has shape {tuple(k.shape)} and {names[1]} {tuple(v.shape)}: all but the last must agree"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[0]} has head dim {k.shape[-1]}, expected {q.shape[-1]} as q")
    check_heads(q, k.shape[-2], names[0])
    check_no_grad(q, k, v)


def check_heads(q: torch.Tensor, heads: int, name: str) -> None:
    """Checks that the query heads fall into groups, one for each key head."""
    if heads == 0 or q.shape[-2] % heads:
        raise ValueError(f"q has {q.shape[-2]} heads: allowed are multiples of the {heads} heads of {name}")


def check_no_grad(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError when a tensor requires grad while grad is enabled."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            "an input requires grad, which these functions do not record: use torch.no_grad(), or train through "
            'hf_efficient\'s attn_implementation="flash_paged", which calls flash_attn_backward'
        )


def check_integers(
    name: str, tensor, dims: int, q: torch.Tensor, dtype: torch.dtype = torch.int32, length=None
) -> None:
    """Checks that `tensor` holds integers in `dims` dimensions, the last contiguous, on q's device. length: of the
    first dimension.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a {dtype} tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is {dtype}")
    if tensor.dim() != dims or (length is not None and tensor.shape[0] != length):
        expected = f"{dims} dimension(s)" + (f", the first {length}" if length is not None else "")
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {q.device} as q")
    if tensor.numel() and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be contiguous")


def check_options(
    q, batch, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, return_lse
) -> dict:
    """The options as the launchers take them: softmax_scale, window (-1 is no limit), softcap, alibi_slopes, s_aux."""
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}: allowed is 0.0, flash_paged has no dropout")
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not softmax_scale > 0:
        raise ValueError(
            f"softmax_scale is {softmax_scale}: allowed are positive numbers, or None for head_dim ** -0.5"
        )
    if not (
        isinstance(window_size, (tuple, list)) and len(window_size) == 2 and all(type(w) is int for w in window_size)
    ):
        raise TypeError(f"window_size is {window_size!r}: allowed is a pair of integers (left, right), -1 for no limit")
    if not softcap >= 0:
        raise ValueError(f"softcap is {softcap}: allowed are positive numbers, or 0.0 for none")
    heads = q.shape[-2]
    s_aux = _check_per_head("s_aux", s_aux, q, [(heads,)], "a floating point tensor")
    alibi_slopes = _check_per_head("alibi_slopes", alibi_slopes, q, [(heads,), (batch, heads)], "a float32 tensor")
    left, right = (-1 if w < 0 or w >= _UNLIMITED else w for w in window_size)
    return {
        "softmax_scale": softmax_scale,
        "window": (left, 0 if causal else right),
        "softcap": float(softcap),
        "alibi_slopes": alibi_slopes,
        "s_aux": s_aux,
        "return_lse": bool(return_lse),
    }


def _check_per_head(name: str, tensor, q: torch.Tensor, shapes: list[tuple], kind: str) -> torch.Tensor | None:
    """`tensor`, contiguous; checks that it is None or has a dtype of `kind` and one of `shapes`."""
    if tensor is None:
        return None
    right = isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in shapes
    if not right or not (tensor.dtype == torch.float32 or (kind != "a float32 tensor" and tensor.is_floating_point())):
        given = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} is {given}: allowed is {kind} {allowed}, one number per query head")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {q.device} as q")
    return tensor.contiguous()


def check_tree(tree_mask, q: torch.Tensor) -> None:
    """Checks that tree_mask is int64 [B, Sq] with at most 64 queries, one bit each."""
    if q.shape[1] > 64:
        raise ValueError(f"q has {q.shape[1]} queries: allowed are at most 64 with a tree_mask, one bit each")
    check_integers("tree_mask", tree_mask, 2, q, torch.int64, length=q.shape[0])
    if tree_mask.shape[1] != q.shape[1]:
        raise ValueError(f"tree_mask has shape {tuple(tree_mask.shape)}, expected {tuple(q.shape[:2])}")
