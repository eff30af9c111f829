"""The roofline: no forward is faster than its arithmetic at the device's best rate, nor than its bytes at its bandwidth.

Paper: Williams, Waterman, Patterson, Roofline: An Insightful Visual Performance Model (2009).
"""

from dataclasses import dataclass

from hf_efficient.evaluation.devices import Device


MEMORY_SHARE = 0.9  # of a device's memory that weights, cache and activations may take; the rest is the runtime's


@dataclass(frozen=True)
class Work:
    """One forward.

    tokens: that it is for, all rows together. flops: multiplications and additions of its matrix products, convolutions
    and attention; rounded_flops: those among them on inputs of 8 bits. bytes_moved: weights and cache read, cache written.
    """

    tokens: int
    flops: float
    rounded_flops: float
    bytes_moved: float

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.bytes_moved


@dataclass(frozen=True)
class Bound:
    """The least time of a `Work` on a device: max(compute_seconds, memory_seconds)."""

    compute_seconds: float
    memory_seconds: float
    tokens: int

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def limit(self) -> str:
        """ "compute" or "memory": what takes longer."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


def bound(work: Work, device: Device, dtype: str, rounded: str | None) -> Bound:
    """`work` on `device`: compute_seconds = (flops - rounded_flops) / rate(dtype) + rounded_flops / rate(rounded), and
    memory_seconds = bytes_moved / bandwidth. rounded: "int8" or "fp8"; unused where nothing is rounded."""
    compute = (work.flops - work.rounded_flops) / device.rate(dtype, dtype)
    if work.rounded_flops:
        compute += work.rounded_flops / device.rate(rounded, dtype)
    return Bound(compute, work.bytes_moved / device.bandwidth, work.tokens)


def largest_batch(memory_bytes: int, weight_bytes: int, bytes_of_a_row: float) -> int:
    """Rows whose cache and activations fit beside the weights: (0.9 * memory - weights) / bytes of a row; 0 when none does."""
    return max(0, int((MEMORY_SHARE * memory_bytes - weight_bytes) / bytes_of_a_row))


def cost_per_million(price_per_hour: float, seconds: float, tokens: int) -> float:
    """What a million tokens cost when `tokens` take `seconds`: price / 3600 * seconds / tokens * 10^6."""
    return price_per_hour / 3600 * seconds / tokens * 1e6
