"""Fills Triton's cache for an H200 on a machine without a GPU, so that a lent one only measures.

    TRITON_CACHE_DIR=FOLDER PYTHONPATH=. python benchmarks/gpu_compile.py benchmarks/attention.py --compile 0/1 --quick

The script runs over tensors that have shapes and addresses but no memory. A driver that stands for CUDA's compiles what
is launched, and runs nothing. Python's minor version, the triton wheel and the folder have to be those of the machine
with the GPU: Triton hashes the first two into its keys, and keeps whole paths. Of the folder, carry `*.json` and
`*.cubin`.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


ADDRESS = 1 << 32  # of every tensor's memory: as aligned as the allocator's
PROPERTIES = SimpleNamespace(multi_processor_count=132, name="NVIDIA H200", major=9, minor=0, warp_size=32)
PROPERTIES.shared_memory_per_block_optin, PROPERTIES.L2_cache_size = 227 << 10, 60 << 20


class Driver:
    """What Triton's launches ask of CUDA's driver."""

    class utils:
        @staticmethod
        def get_device_properties(device):
            return dict(max_shared_mem=227 << 10, multiprocessor_count=132, warpSize=32, max_num_regs=65536)

        @staticmethod
        def load_binary(name, kernel, shared, device):
            return 0, 0, 32, 0, 1024  # module, function, registers, spills, most threads

    @staticmethod
    def launcher_cls(source, metadata):
        return lambda *args, **kwargs: None

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


class Stream(contextlib.AbstractContextManager):
    """Every stream is the same."""

    def __init__(self, *args, **kwargs):
        pass

    def __exit__(self, *error):
        pass

    def __eq__(self, other):
        return True

    __hash__ = None

    def wait_stream(self, other):
        pass


_getitem, _setitem, _tensor = torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.tensor


def getitem(self, index):
    """Torch's own asks the CUDA runtime. Views keep their offsets, by which Triton specializes."""
    if not isinstance(self, FakeTensor):
        return _getitem(self, index)
    parts = index if isinstance(index, tuple) else (index,)
    with fake_tensor.unset_fake_temporarily():
        shape_only = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        if any(isinstance(part, (torch.Tensor, list)) for part in parts):
            parts = [_tensor(part) if isinstance(part, list) else part for part in parts]
            parts = [torch.zeros(p.shape, dtype=torch.int64, device="meta") if torch.is_tensor(p) else p for p in parts]
            shape = _getitem(shape_only, tuple(parts)).shape
        else:
            view = _getitem(shape_only, index)
            shape = None
    if shape is not None:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
    return self.as_strided(view.shape, view.stride(), self.storage_offset() + view.storage_offset())


def setitem(self, index, value):
    if not isinstance(self, FakeTensor):
        _setitem(self, index, value)


def tensor(data, *, dtype=None, device=None, **options):
    with fake_tensor.unset_fake_temporarily():
        made = _tensor(data, dtype=dtype)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


@contextlib.contextmanager
def as_if_on_a_gpu():
    """Inside, CUDA tensors are fake ones, and launches compile. Gives the counts of kernels compiled and found."""
    counts = {"compiled": 0, "found": 0}

    def listen(*, cache_hit, **others):
        counts["found" if cache_hit else "compiled"] += 1

    cuda = dict(is_available=lambda: True, is_initialized=lambda: True, device=Stream, stream=Stream, Stream=Stream)
    cuda |= dict(get_device_properties=lambda device=None: PROPERTIES, synchronize=lambda *device: None)
    cuda |= dict(get_device_capability=lambda device=None: (9, 0), current_device=lambda: 0, _lazy_init=lambda: None)
    cuda |= {name: lambda device=None: Stream() for name in ("current_stream", "default_stream")}
    with (
        mock.patch.object(driver, "_active", Driver()),
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch.Tensor, __getitem__=getitem, __setitem__=setitem),
        mock.patch.object(FakeTensor, "data_ptr", lambda self: ADDRESS + self.storage_offset() * self.itemsize),
        mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(knobs.compilation, "listener", listen),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield counts


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
    with as_if_on_a_gpu() as counts, contextlib.suppress(SystemExit):
        runpy.run_path(arguments[0], run_name="__main__")
    print(f"{counts['compiled']} kernels compiled, {counts['found']} found in the cache")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
