"""Columns of inputs in another order (GPTQ's activation order), as one instruction of a captured forward. Products with
the same input in the same order share the result."""

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.replay.instructions import OPS, Instruction, sizes
from hf_efficient.kernels.replay.recorder import is_capturing
from hf_efficient.kernels.replay.registry import replays


def reorder(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [..., K] -> x[..., order], for int64 [K] that never changes."""
    if x.is_cpu and is_capturing():
        return torch.ops.hf_efficient.reorder(x, order)
    return x.index_select(-1, order)


@replays("hf_efficient::reorder", once=True)
def _instructions(y, x, order):
    if x.element_size() not in (2, 4) or not all(tensor.is_contiguous() for tensor in (y, x, order)):
        return None
    width = len(order)
    instruction = Instruction(OPS["GATHER"], sizes((x.numel() // width, width, x.element_size())))
    instruction.y.data, instruction.a.data, instruction.b.data = y.data_ptr(), x.data_ptr(), order.data_ptr()
    return [instruction.noting(y, [x, order])]


op.define(
    "reorder(Tensor x, Tensor order) -> Tensor",
    cpu=lambda x, order: x.index_select(-1, order),
    fake=lambda x, order: torch.empty_like(x),
)
