"""Gives freed memory back to the operating system while a model loads.

glibc keeps what many short-lived buffers leave behind (300 MB were seen after quantizing a model of 270 MB), so that a
smaller model would end up in a larger process.
"""

import ctypes


_TRIM_EVERY = 1 << 24  # bytes of weights

try:
    _malloc_trim = ctypes.CDLL(None).malloc_trim
except (AttributeError, OSError, TypeError):  # another C library, another system
    _malloc_trim = None


class HeapTrimmer:
    """Counts the bytes of the weights that were worked on, and returns free heap pages every 16 MB of them. Does nothing
    where the C library has no `malloc_trim`."""

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
