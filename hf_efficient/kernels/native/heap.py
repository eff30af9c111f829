"""Gives freed memory back to the operating system while a model loads.

glibc keeps the memory of many short-lived buffers: 300 MB after quantizing a model of 270 MB. Without this, the process
of a quantized model is larger than that of the original.
"""

import ctypes


_TRIM_EVERY = 1 << 24  # 16 MB of weights

_MMAP_THRESHOLD, _LARGE = -3, 1 << 17  # glibc's M_MMAP_THRESHOLD, and what it is at first

try:
    _malloc_trim, _mallopt = ctypes.CDLL(None).malloc_trim, ctypes.CDLL(None).mallopt
except (AttributeError, OSError, TypeError):  # another C library, another system
    _malloc_trim = _mallopt = None


def map_large_blocks() -> None:
    """From now on the C library maps every block of 128 kB or more apart, and unmaps it when it is freed. Left alone it
    raises that limit to 32 MB, and the holes between blocks that live longer are lost to the process. Does nothing
    where the C library has no `mallopt`."""
    if _mallopt is not None:
        _mallopt(_MMAP_THRESHOLD, _LARGE)


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
