"""Checks that the tests of several formats share."""

import torch
from helpers import assert_close


def check_declared(format, tensors, rows: int, columns: int, dtype=torch.bfloat16) -> None:
    """Canonical tensors have the shapes and dtypes that the format declares, codes come back from the packed ones, and
    a stack of experts dequantizes as each of them does."""
    assert {name: tuple(t.shape) for name, t in tensors.items()} == format.shapes(rows, columns)
    assert {name: t.dtype for name, t in tensors.items()} == format.dtypes(dtype)
    if hasattr(format, "unpack"):
        assert torch.equal(format.pack(format.unpack(tensors["qweight"], columns)), tensors["qweight"])
    one = format.dequantize(tensors, columns, dtype)
    both = format.dequantize({name: torch.stack([t, t]) for name, t in tensors.items()}, columns, dtype)
    assert torch.equal(both.view(torch.uint8), torch.stack([one, one]).view(torch.uint8))


def check_on_a_gpu(format, tensors, columns: int, kind: type | None, rms: float, maximum: float | None = None) -> None:
    """On a GPU the layout is a `kind` (None: the one that serves everything), multiplies, and gives back the codes.
    maximum: the largest error, by default 0.05 of the largest output."""
    tensors = {name: t.cuda() for name, t in tensors.items()}
    layout = format.layout(tensors, columns, torch.bfloat16)
    assert type(layout) is kind if kind else not layout.replaces_qweight
    dense = format.dequantize(tensors, columns, torch.float64)
    for count in (1, 7, 300):
        x = torch.randn(count, columns, dtype=torch.bfloat16, device="cuda")
        expected = x.double() @ dense.t()
        largest = maximum or 0.05 * expected.abs().max().item()
        assert_close(layout.matmul(x), expected, rms, largest, "bfloat16 weights and results, float32 sums")
    if layout.replaces_qweight:
        assert torch.equal(layout.canonical(), tensors["qweight"])
