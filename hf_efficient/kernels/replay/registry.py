"""The table of the torch ops that become instructions of a replay. A kernel family registers its own ops. Other ops are
called again by Python."""

from collections.abc import Callable

import torch

from hf_efficient.kernels.replay.instructions import MOST_DIMS, Instruction


_MAKERS: dict[str, Callable] = {}
_ONCE: set[str] = set()


def replays(*ops: str, once: bool = False) -> Callable:
    """Decorates the function that makes the instructions of ops, "namespace::name" or "namespace::name.overload".

    The function is called with the results of the op, which exist by then, and its arguments:
    `make(*results, *args, **kwargs)`. It returns a list of instructions, or None where they do not serve these
    arguments.

    once: whether calls with the same first argument, and constants of equal values behind it, share one result.
    """

    def register(make: Callable) -> Callable:
        _MAKERS.update(dict.fromkeys(ops, make))
        if once:
            _ONCE.update(ops)
        return make

    return register


def once_key(func: torch._ops.OpOverload, args: tuple) -> tuple | None:
    """Equal for calls that share one result; None for an op that is computed every time. Constants are compared by
    their bytes."""
    if func.name() not in _ONCE:
        return None
    x, *constants = args
    values = (constant.view(torch.uint8).numpy().tobytes() for constant in constants)
    return func, x.data_ptr(), x.shape, x.stride(), x.dtype, *values


def instructions_of(func: torch._ops.OpOverload, args, kwargs, results: list[torch.Tensor]) -> list[Instruction] | None:
    """The instructions of a call of `func` that made `results`; None where it has to be called again."""
    make = _MAKERS.get(func.name())
    if make is None and not func._schema.is_mutable:  # one function for all overloads that write no argument
        make = _MAKERS.get(func._schema.name)
    if make is None or len(results) != len(func._schema.returns) or any(y.dim() > MOST_DIMS for y in results):
        return None
    return make(*results, *args, **kwargs)
