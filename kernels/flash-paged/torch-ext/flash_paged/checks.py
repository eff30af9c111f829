"""Checks of the public functions' arguments: every error names the argument, what was given and what is allowed."""

import torch

from .tiles import INTERPRETED


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_UNLIMITED = 2**30  # a window this wide is no window


def check_device(q: torch.Tensor) -> None:
    """The kernels run on CUDA (or ROCm) tensors, and on CPU tensors only under the Triton interpreter."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    if not q.is_cuda and not (INTERPRETED and q.device.type == "cpu"):
        raise ValueError(
            f"q is on device {q.device}: flash_paged runs on CUDA and ROCm devices (on CPU only under the Triton "
            "interpreter, TRITON_INTERPRET=1 set before it is imported)"
        )


def check_tensor(name: str, tensor, dims: int, like: torch.Tensor, head_dim: bool = True) -> None:
    """`tensor` has `dims` dimensions, the dtype and device of `like` (which is q or k) and a contiguous last dimension."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    if tensor.dtype not in DTYPES or tensor.dtype != like.dtype:
        allowed = "float16, bfloat16 or float32, the same for all of them"
        raise TypeError(f"{name} has dtype {tensor.dtype} beside {like.dtype}: allowed are {allowed}")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device} as the first tensor")
    if head_dim and not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} has head dim {tensor.shape[-1]}: allowed are 1 to {MAX_HEAD_DIM}")
    if head_dim and tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: it must be contiguous (stride 1); "
            "call .contiguous()"
        )


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str] = ("k", "v")) -> None:
    """q [..., Hq, D], k [..., Hk, D] and v [..., Hk, Dv] (checked one by one before) fit each other and need no gradient."""
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{names[0]} has shape {tuple(k.shape)} and {names[1]} {tuple(v.shape)}: all but the last must agree"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[0]} has head dim {k.shape[-1]}, expected {q.shape[-1]} as q")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads: allowed are multiples of the {k.shape[-2]} heads of {names[0]}")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(
            "flash_paged has no backward pass, but an input requires grad: use torch.no_grad() to run the model, or train "
            'it with attn_implementation="sdpa"'
        )


def check_integers(
    name: str, tensor, dims: int, q: torch.Tensor, dtype: torch.dtype = torch.int32, length=None
) -> None:
    """`tensor` is a contiguous-rowed integer tensor of `dims` dimensions on q's device, `length` long in the first."""
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


def check_options(q, dropout_p, softmax_scale, causal, window_size, softcap, s_aux) -> dict:
    """The options as the launchers take them: softmax_scale, window (-1 is no limit), softcap, s_aux."""
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
        raise TypeError(
            f"window_size is {window_size!r}: allowed is a pair of integers (left, right), -1 for no limit"
        )
    if not softcap >= 0:
        raise ValueError(f"softcap is {softcap}: allowed are positive numbers, or 0.0 for none")
    if s_aux is not None:
        if not isinstance(s_aux, torch.Tensor) or s_aux.shape != q.shape[-2:-1] or not s_aux.is_floating_point():
            given = f"{s_aux.dtype} {tuple(s_aux.shape)}" if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
            raise ValueError(
                f"s_aux is {given}: allowed is a floating point tensor [{q.shape[-2]}], one per query head"
            )
        if s_aux.device != q.device:
            raise ValueError(f"s_aux is on {s_aux.device}, expected {q.device} as q")
        s_aux = s_aux.contiguous()
    left, right = (-1 if w < 0 or w >= _UNLIMITED else w for w in window_size)
    window = (left, 0 if causal else right)
    return {"softmax_scale": softmax_scale, "window": window, "softcap": float(softcap), "s_aux": s_aux}
