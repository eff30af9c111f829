"""The op of a feed-forward layer with contextual sparsity: it computes only the neurons that each row of x activates.

Few rows of bfloat16 are one call of `native/contextual/contextual.cpp`, on CPUs that it is compiled for
(`native/tiers.py`). Elsewhere on a CPU it is torch's index_select and products.
"""

import ctypes
import functools

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay import instructions
from hf_efficient.kernels.replay.registry import replays


MOST_ROWS = 32  # of a call; native/contextual/contextual.cpp has the same number
ACTIVATIONS = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_NUMBERS = ("rows", "hidden", "neurons", "rank", "activation")
_POINTERS = (
    *("x", "project", "score", "score_up", "limit", "spread"),
    *("gate", "gate_bias", "up", "up_bias", "down", "down_bias", "y"),
)


class _ContextualCall(ctypes.Structure):
    """`ContextualCall` of native/contextual/contextual.cpp."""

    _fields_ = [*((name, ctypes.c_int64) for name in _NUMBERS), *((name, ctypes.c_void_p) for name in _POINTERS)]


@once_a_tier
def kernel():
    """The compiled function; None where torch's operators serve instead."""
    library = build.load("contextual", (_ContextualCall,))
    if library is None:
        return None
    library.hf_contextual_mlp.argtypes = [ctypes.c_void_p]
    return library.hf_contextual_mlp


def native_call(y, x, project, score, score_up, limit, spread, *weights_and_activation) -> _ContextualCall | None:
    """The structure that makes the kernel write the result into `y`; None where it does not serve the arguments of the
    op."""
    *weights, activation = weights_and_activation
    tensors = (x, project, score, score_up, limit, spread, *weights, y)
    gate, gate_bias, up, up_bias, down, down_bias = weights
    hidden, neurons = x.shape[-1], len(limit)
    rank = 0 if project is None else len(project)
    shapes = (
        *((t, (neurons, hidden)) for t in (gate, up, down)),
        *((t, (neurons,)) for t in (limit, spread, gate_bias, up_bias)),
        *((t, (neurons, rank)) for t in (score, score_up)),
        (project, (rank, hidden)),
        (down_bias, (hidden,)),
    )
    if (
        not 0 < x.numel() <= MOST_ROWS * hidden
        or any(t is not None and t.shape != shape for t, shape in shapes)
        or any(t is not None and not (t.is_cpu and t.dtype is torch.bfloat16 and t.is_contiguous()) for t in tensors)
        or kernel() is None
    ):
        return None
    numbers = x.numel() // hidden, hidden, neurons, rank, list(ACTIVATIONS).index(activation)
    return _ContextualCall(*numbers, *(None if t is None else t.data_ptr() for t in tensors))


def choose(x, project, score, score_up, limit, spread, gate, gate_bias, activation) -> torch.Tensor:
    """Which neurons the rows of x [rows, hidden] activate: bool [rows, neurons]. Arguments as of the op."""
    act = ACTIVATIONS[activation]
    if project is None:
        return act(F.linear(x, gate, gate_bias).float()).abs() > limit
    inner = F.linear(x, project).float()
    first = F.linear(inner, score.float())
    if score_up is None:
        return first > limit
    return (act(first).square() + spread.float()) * (F.linear(inner, score_up.float()).square() + limit.float()) > 1


def _torch(x, *arguments):
    *_, gate, gate_bias, up, up_bias, down, down_bias, activation = arguments
    rows = x.reshape(-1, x.shape[-1])
    mask = choose(rows, *arguments[:7], activation)
    chosen = mask.any(0).nonzero()[:, 0]

    def some(weight, bias):
        return F.linear(rows, weight[chosen], None if bias is None else bias[chosen])

    values = ACTIVATIONS[activation](some(gate, gate_bias))
    if up is not None:
        values = values * some(up, up_bias)
    y = (values * mask[:, chosen]) @ down[chosen]
    return (y if down_bias is None else y + down_bias).view_as(x)


def _masked(x, *arguments):
    """All neurons, and 0 for those that a row does not activate. On a GPU: a list of the chosen ones would have a size
    that the host has to read, which takes as long as reading the other weights, and no CUDA graph holds it."""
    *_, gate, gate_bias, up, up_bias, down, down_bias, activation = arguments
    rows = x.reshape(-1, x.shape[-1])
    values = ACTIVATIONS[activation](F.linear(rows, gate, gate_bias))
    if up is not None:
        values = values * F.linear(rows, up, up_bias)
    y = torch.where(choose(rows, *arguments[:7], activation), values, 0) @ down
    return (y if down_bias is None else y + down_bias).view_as(x)


def _cpu(x, *arguments):
    x = x.contiguous()
    y = torch.empty_like(x)
    call = native_call(y, x, *arguments)
    if call is None:
        return _torch(x, *arguments)
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
    kernel()(ctypes.addressof(call))
    return y


@replays("hf_efficient::contextual_mlp")
def _instructions(y, *arguments):
    call = native_call(y, *arguments)
    inputs = [x for x in arguments if isinstance(x, torch.Tensor)]
    return None if call is None else [instructions.call(kernel(), call, y, inputs)]


op.define(
    "contextual_mlp(Tensor x, Tensor? project, Tensor? score, Tensor? score_up, Tensor limit, Tensor? spread, "
    "Tensor gate, Tensor? gate_bias, Tensor? up, Tensor? up_bias, Tensor down, Tensor? down_bias, str activation) "
    "-> Tensor",
    cpu=_cpu,
    cuda=_masked,
    fake=lambda x, *_: torch.empty_like(x),
)
