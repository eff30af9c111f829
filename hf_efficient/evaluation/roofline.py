"""The roofline: a forward takes at least its arithmetic at the device's best rate, and its bytes at the bandwidth.

Paper: Williams, Waterman, Patterson, Roofline: An Insightful Visual Performance Model (2009).
"""

from dataclasses import dataclass

from hf_efficient.evaluation.devices import Device


MEMORY_SHARE = 0.9  # of a device's memory that weights, cache and activations may take; the rest is the runtime's


@dataclass(frozen=True)
class Work:
    """The work of one forward."""

    tokens: int  # of all sequences together
    flops: float  # multiplications and additions of matrix products, convolutions and attention
    rounded_flops: float  # those among them on inputs of 8 bits
    bytes_moved: float  # weights and cache read, cache written

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.bytes_moved


@dataclass(frozen=True)
class Bound:
    """The least time of a `Work` on a device."""

    compute_seconds: float
    memory_seconds: float
    tokens: int

    @property
    def seconds(self) -> float:
        """max(compute_seconds, memory_seconds)."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def limit(self) -> str:
        """Which takes longer, "compute" or "memory"."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def bound(work: Work, device: Device, dtype: str, rounded: str | None) -> Bound:
    """`work` on `device`: compute_seconds = (flops - rounded_flops) / rate(dtype) + rounded_flops / rate(rounded), and
    memory_seconds = bytes_moved / bandwidth. rounded: "int8" or "fp8"; unused where nothing is rounded."""
    compute = (work.flops - work.rounded_flops) / device.rate(dtype, dtype)
    if work.rounded_flops:
        compute += work.rounded_flops / device.rate(rounded, dtype)
    return Bound(compute, work.bytes_moved / device.bandwidth, work.tokens)


def largest_batch(memory_bytes: int, weight_bytes: int, bytes_per_sequence: float) -> int:
    """Sequences whose cache and activations fit beside the weights: (0.9 * memory - weights) / bytes per sequence."""
    return max(0, int((MEMORY_SHARE * memory_bytes - weight_bytes) / bytes_per_sequence))


def cost_per_million(price_per_hour: float, seconds: float, tokens: int) -> float:
    """The price of a million tokens when `tokens` take `seconds`: price / 3600 * seconds / tokens * 10^6."""
    return price_per_hour / 3600 * seconds / tokens * 1e6
