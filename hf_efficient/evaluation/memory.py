"""Bytes that a model and a process hold in memory."""

import sys

import psutil
import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes allocated for the model's parameters and buffers, every storage counted once (tied weights share one)."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_mkldnn:  # opaque: oneDNN's own layout has no storage
            storages[id(tensor)] = tensor.nbytes
        else:
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of allocated device memory (CUDA), or of the process's resident memory (CPU), since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":  # ru_maxrss would count the process that started this one
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def private_bytes() -> int:
    """Bytes of memory that this process alone has: resident ones, or, where `ulimit -d` bounds them, all that it has
    asked for. On other systems than Linux: all that is resident."""
    memory = psutil.Process().memory_info()
    if sys.platform != "linux":
        return memory.rss
    import resource

    is_bounded = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return memory.data if is_bounded else memory.rss - memory.shared
