"""Gives freed memory back to the operating system while a model loads.

glibc keeps the memory of many short-lived buffers: 300 MB after quantizing a model of 270 MB. Without this, the process
of a quantized model is larger than that of the original.
"""

import ctypes


_TRIM_EVERY = 1 << 24  # 16 MB of weights

try:
    _malloc_trim = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # another C library, another system
    _malloc_trim = None


class HeapTrimmer:
    """Counts the bytes of processed weights and returns free heap pages every 16 MB. Does nothing where the C library
    has no `malloc_trim`."""

    def __init__(self):
        self.pending = 0

    def count(self, nbytes: int) -> None:
        self.pending += nbytes
        if self.pending >= _TRIM_EVERY:
            self.flush()

    def flush(self) -> None:
        """Returns free heap pages now."""
        self.pending = 0
        if _malloc_trim is not None:
            _malloc_trim(0)
