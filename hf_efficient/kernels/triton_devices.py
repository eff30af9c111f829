"""Which devices run the Triton kernels."""

import functools
import importlib.util
import logging

import torch


logger = logging.getLogger(__name__)


@functools.cache
def why_not(device: torch.device) -> str | None:
    """Why the Triton kernels do not run on `device`, None where they do, and where a plan is made for a CUDA device on
    a machine without one."""
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA and ROCm devices, not on {device.type!r}"
    if not torch.cuda.is_available():
        return None
    if importlib.util.find_spec("triton") is None:
        return "the Triton kernels are not available: triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return (
            "the Triton kernels need bfloat16 and asynchronous copies, of compute capability 8.0, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    return None


@functools.cache
def serves(device: torch.device) -> bool:
    """Whether the Triton kernels multiply on `device`. Where they do not, and neither do kernels of the CPU, a message
    says once that torch does."""
    reason = why_not(device)
    if reason is not None and device.type not in ("cpu", "meta"):
        logger.warning("%s: weights are dequantized in every forward and multiplied by torch", reason)
    return reason is None
