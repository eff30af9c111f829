"""Products of int8 weights and int8 activations: checks and launch (the launch serves float8 and LLM.int8() too)."""

import torch
import triton

from . import w8a8_configs
from .split_k import processors, split
from .w8a8_kernels import STEP, w8a8_kernel
from .weight_only import DTYPES, INTERPRETED, _on


def check_codes(dtype: torch.dtype, w_dtype: torch.dtype | None = None, **codes: torch.Tensor) -> None:
    """w_codes [N, K] and maybe x_codes [M, K], by name. w_dtype: another one that w_codes may have."""
    for name, tensor in codes.items():
        if tensor.dtype != dtype and (name != "w_codes" or tensor.dtype != w_dtype):
            also = f" or {w_dtype}" if name == "w_codes" and w_dtype is not None else ""
            raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is {dtype}{also}")
        if tensor.dim() != 2 or tensor.shape[1] == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: allowed is [rows, K] with K >= 1")
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: allowed is a contiguous last dimension")
    x_codes, w_codes = codes.get("x_codes"), codes["w_codes"]
    if x_codes is not None and x_codes.shape[1] != w_codes.shape[1]:
        raise ValueError(f"x_codes has {x_codes.shape[1]} columns, w_codes {w_codes.shape[1]}: allowed is one number")
    if w_codes.shape[0] == 0:
        raise ValueError("w_codes has no rows: allowed is [N, K] with N >= 1")
    if w_codes.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"w_codes is on {w_codes.device}: the Triton kernels run on CUDA and ROCm devices")


def check_out(bias, out_dtype, w_codes) -> None:
    """Raises TypeError or ValueError unless out_dtype is served and bias is None or a contiguous float [N]."""
    if out_dtype not in DTYPES:
        raise TypeError(f"out_dtype={out_dtype}: allowed is one of {DTYPES}")
    if bias is None:
        return
    if bias.dtype not in DTYPES:
        raise TypeError(f"bias has dtype {bias.dtype}: allowed is one of {DTYPES}")
    if bias.shape != w_codes.shape[:1] or (bias.numel() > 1 and bias.stride(0) != 1):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: allowed is a contiguous [{w_codes.shape[0]}]")


def check_devices(device, **tensors) -> None:
    """Raises ValueError unless `tensors`, by name, are None or on `device`, that of w_codes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, w_codes on {device}: allowed is one device")


def check_per_row(name, tensor, rows, dtype) -> None:
    """One value for the tensor, or [rows, 1] or [rows]."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: allowed is {dtype}")
    if tensor.numel() != 1 and tuple(tensor.shape) not in ((rows, 1), (rows,)):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: allowed is one value, [{rows}, 1] or [{rows}]")


def check_sums(w_sums: torch.Tensor | None, w_codes: torch.Tensor) -> None:
    """Raises ValueError unless w_sums is None or a contiguous int32 [N]."""
    if w_sums is None:
        return
    if w_sums.dtype != torch.int32 or w_sums.shape != w_codes.shape[:1] or not w_sums.is_contiguous():
        given = f"{w_sums.dtype} {tuple(w_sums.shape)} with strides {w_sums.stride()}"
        raise ValueError(f"w_sums is {given}: allowed is a contiguous int32 [{len(w_codes)}]")


def row_stride(tensor: torch.Tensor | None) -> int:
    """0 for one value that every row reads."""
    return 0 if tensor is None or tensor.numel() == 1 else tensor.stride(0)


def _are_aligned(*codes: torch.Tensor) -> bool:
    """Whether 16 bytes at a time can be read."""
    return not any(rows.shape[1] % 16 or rows.stride(0) % 16 or rows.data_ptr() % 16 for rows in codes)


def _serves_tma(kind: str, tokens: int, rows: int, device: torch.device) -> bool:
    if tokens < w8a8_configs.TMA_FROM.get(kind, float("inf")):
        return False
    if w8a8_configs.programs(w8a8_configs.TMA_TILES[kind], tokens, rows) < processors(device):
        return False
    if INTERPRETED:
        return True
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] not in w8a8_configs.TMA_ON[kind]:
        return False
    triton.set_allocator(_scratch)
    return True


def _scratch(size: int, alignment: int, stream) -> torch.Tensor:
    """Where the descriptors made on the device lie."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch(
    kind, x_codes, w_codes, x_scale, w_scale, bias, out_dtype, *, block_scales=False, x_zero_point=None,
    w_zero_point=None, x_sums=None, w_sums=None, outlier_x=None, outlier_columns=None, outlier_count=None,
) -> torch.Tensor:  # fmt: skip
    """Checked arguments -> out [M, N]."""
    (tokens, in_features), out_features, device = x_codes.shape, w_codes.shape[0], w_codes.device
    out = torch.empty(tokens, out_features, dtype=out_dtype, device=device)
    if tokens == 0:
        return out
    aligned = _are_aligned(x_codes, w_codes)
    plain = not block_scales and all(t is None for t in (x_zero_point, w_zero_point, outlier_x))
    tma = plain and aligned and _serves_tma(kind, tokens, out_features, device)
    if tma:
        tile = w8a8_configs.TMA_TILES[kind]
    else:
        many_registers = block_scales or kind in ("fp8_as_fp16", "e5m2_as_fp16")
        tile = w8a8_configs.choose_tile(tokens, many_registers, aligned, out_features, processors(device))
    row_blocks, token_blocks = triton.cdiv(out_features, tile.block_n), triton.cdiv(tokens, tile.block_m)
    steps = triton.cdiv(in_features, STEP.value)
    sums = torch.int32 if kind == "int8" else torch.float32
    programs, shape = row_blocks * token_blocks, (tokens, out_features)
    per_split, splits, partial, arrivals = split(tile, programs, steps, shape, sums, device)
    with _on(device):
        w8a8_kernel[(row_blocks * token_blocks, splits)](
            x_codes, w_codes, x_scale, w_scale, x_zero_point, w_zero_point, x_sums, w_sums, bias, outlier_x,
            outlier_columns, outlier_count, out, partial, arrivals, tokens, out_features, in_features,
            x_codes.stride(0), w_codes.stride(0), x_scale.stride(0) if block_scales else row_stride(x_scale),
            x_scale.stride(1) if block_scales else 0, w_scale.stride(0) if block_scales else row_stride(w_scale),
            w_scale.stride(1) if block_scales else 0, row_stride(x_zero_point), row_stride(w_zero_point),
            0 if outlier_x is None else outlier_x.stride(0), per_split, KIND=kind, BLOCK_SCALES=block_scales,
            EVEN_K=in_features % STEP.value == 0, SPLIT=splits > 1, TMA=tma, BLOCK_N=tile.block_n,
            BLOCK_M=tile.block_m, UPCAST=INTERPRETED, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, w8a8_configs.STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out


def w8a8_linear(
    x_codes: torch.Tensor, w_codes: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
    bias: torch.Tensor | None = None, *, x_zero_point: torch.Tensor | None = None,
    w_zero_point: torch.Tensor | None = None, w_sums: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """(x_codes - x_zero_point) times the transpose of (w_codes - w_zero_point), times both scales, plus bias.

    x_codes: int8 [M, K]; w_codes: int8 [N, K]; columns contiguous, rows at any stride. K and strides that are multiples
        of 16 are read 16 bytes at a time, others byte by byte: pad with codes equal to the zero point where it matters.
    x_scale: float32, one value or [M, 1] or [M]; w_scale: one value or [N, 1] or [N]. x_zero_point, w_zero_point: int8
        alike, None = 0.
    w_sums: int32 [N], `w_codes.sum(1, dtype=torch.int32)`, which x_zero_point needs: computed when it is not given,
        for a pass over the weight.
    bias: [N], float of any kind. out_dtype: float16, bfloat16 or float32.

    Returns [M, N]. The products are added exactly in int32, the rest is float32, rounded once at the end. No
    synchronisation; the result does not depend on the order in which programs run. Integer codes have no gradients.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served, and for a K whose sum
    could exceed int32 (131071 without zero points, 65793 with one, 33025 with two).
    """
    check_codes(torch.int8, x_codes=x_codes, w_codes=w_codes)
    check_out(bias, out_dtype, w_codes)
    tokens, in_features = x_codes.shape
    for name, tensor, rows, dtype in (
        ("x_scale", x_scale, tokens, torch.float32),
        ("w_scale", w_scale, len(w_codes), torch.float32),
        ("x_zero_point", x_zero_point, tokens, torch.int8),
        ("w_zero_point", w_zero_point, len(w_codes), torch.int8),
    ):
        if tensor is not None:
            check_per_row(name, tensor, rows, dtype)
    check_sums(w_sums, w_codes)
    check_devices(
        w_codes.device,
        x_codes=x_codes,
        x_scale=x_scale,
        w_scale=w_scale,
        bias=bias,
        x_zero_point=x_zero_point,
        w_zero_point=w_zero_point,
        w_sums=w_sums,
    )
    largest = (255 if x_zero_point is not None else 128) * (255 if w_zero_point is not None else 128)
    if in_features * largest >= 2**31:
        raise ValueError(f"K = {in_features}: allowed is at most {(2**31 - 1) // largest}, or the sum overflows int32")
    x_sums = None
    if x_zero_point is not None and w_sums is None:
        w_sums = w_codes.sum(1, dtype=torch.int32)
    if w_zero_point is not None:
        x_sums = x_codes.sum(1, dtype=torch.int32)
    return launch(
        "int8", x_codes, w_codes, x_scale, w_scale, bias, out_dtype, x_zero_point=x_zero_point,
        w_zero_point=w_zero_point, x_sums=x_sums, w_sums=w_sums,
    )  # fmt: skip
