"""Reads of tensors on the host, which no capture can repeat."""

import torch
from torch.overrides import TorchFunctionMode


_HOST_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr)


class NotReplayable(RuntimeError):
    """The forward reads numbers of tensors on the host, or draws random ones."""


class _UnknownSize(torch.Tensor):
    """Stands for a tensor whose size is the value of another, which the host does not know. Any use of it is
    refused."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotReplayable(f"the forward calls {func.__name__} on a tensor whose size it reads from another")


class UnknownSizes(TorchFunctionMode):
    """Lets a forward make a mask of all columns that it does not use."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.ones and any(isinstance(size, torch.Tensor) for size in args):
            return torch.empty(0).as_subclass(_UnknownSize)
        return func(*args, **(kwargs or {}))


class HostReads(UnknownSizes):
    """Also refuses functions that read numbers without passing the dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            raise NotReplayable(f"the forward calls {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs)
