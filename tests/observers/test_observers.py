"""Observers of activation ranges against brute force on small data."""

import math

import pytest
import torch

from hf_efficient.observers.absmax import AbsMaxObserver
from hf_efficient.observers.entropy import LEVELS, EntropyObserver, clipped_divergences
from hf_efficient.observers.histogram import BINS
from hf_efficient.observers.mse import MSEObserver
from hf_efficient.observers.percentile import PercentileObserver


OBSERVERS = (AbsMaxObserver, PercentileObserver, EntropyObserver, MSEObserver)


def activations(rows=60, columns=12):
    """Heavy tails, channels of very different size and sign, one of zeros."""
    x = torch.randn(rows, columns) * torch.rand(rows, columns).pow(2) * torch.logspace(-2, 1, columns)
    x[:, 3], x[:, 5] = 0.0, x[:, 5].abs()
    return x


def ranges(kind, x, granularity, **arguments):
    observer = kind(granularity, **arguments)
    for batch in x.split(7):
        observer.update(batch.view(1, *batch.shape))
    return observer.range()


def seen(observer, x):
    observer.update(x[:, None])
    return observer.range()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", OBSERVERS)
def test_granularities_are_ranges_of_parts(kind, symmetric):
    """A channel's (a token's) range is the tensor's range of that channel (token) alone."""
    x = activations(10, 7)
    for granularity, parts, index in (("channel", x.t().split(1), 5), ("token", x.split(1), 1)):
        low, high = ranges(kind, x, granularity, symmetric=symmetric)
        assert low.shape == high.shape == (len(parts),) and low.dtype == torch.float32
        alone = parts[index].reshape(1, 1, -1) if granularity == "token" else parts[index].reshape(1, -1, 1)
        expected = kind("tensor", symmetric=symmetric)
        for batch in alone.split(7, 1) if granularity == "channel" else [alone]:
            expected.update(batch)
        assert torch.equal(torch.stack([low[index], high[index]]), torch.cat(expected.range()))


@pytest.mark.parametrize("kind", OBSERVERS)
def test_ranges_hold_zero_and_never_more_than_was_seen(kind):
    x = activations()
    for granularity in ("tensor", "channel"):
        low, high = ranges(kind, x, granularity, symmetric=False)
        whole_low, whole_high = ranges(AbsMaxObserver, x, granularity, symmetric=False)
        assert (low <= 0).all() and (high >= 0).all() and (low >= whole_low).all() and (high <= whole_high).all()
        low, high = ranges(kind, x, granularity, symmetric=True)
        assert torch.equal(low, -high) and (high <= torch.maximum(-whole_low, whole_high)).all()


def test_absmax():
    x = activations()
    low, high = ranges(AbsMaxObserver, x, "channel", symmetric=False)
    assert torch.equal(low, x.amin(0).clamp_max(0)) and torch.equal(high, x.amax(0).clamp_min(0))
    assert torch.equal(ranges(AbsMaxObserver, x, "token")[1], x.abs().amax(1))
    assert torch.equal(ranges(AbsMaxObserver, x, "tensor")[1], x.abs().max()[None])


@pytest.mark.parametrize("percentile", [75.0, 99.0, 100.0])
def test_percentile(percentile):
    x = activations()
    width = 2 * x.abs().max().item() / BINS  # a limit may be twice the largest magnitude
    magnitude = x.abs().flatten().sort().values
    expected = magnitude[math.ceil(percentile / 100 * len(magnitude)) - 1]
    high = ranges(PercentileObserver, x, "tensor", percentile=percentile)[1]
    assert 0 <= (high - expected).item() <= width or percentile == 100 and high == expected
    low, high = ranges(PercentileObserver, x, "tensor", symmetric=False, percentile=percentile)
    beyond = (100 - percentile) / 200 * x.numel()
    assert (x > high).sum() <= beyond and (x < low).sum() <= beyond
    assert (x > high - width).sum() >= beyond and (x < low + width).sum() >= beyond


def divergence_by_loops(counts, bins):
    """KL of one histogram as in the slides of TensorRT's calibration, a bin at a time in float64."""
    p = counts[:bins].clone()
    p[-1] += counts[bins:].sum()
    q = torch.zeros(bins, dtype=torch.float64)
    for level in range(LEVELS):
        members = [b for b in range(bins) if b * LEVELS // bins == level and counts[b] > 0]
        for b in members:
            q[b] = counts[members].sum() / len(members)
    p, q = p + 1e-4, q + 1e-4
    p, q = p / p.sum(), q / q.sum()
    return sum((p[b] * (p[b] / q[b]).log()).item() for b in range(bins))


def test_entropy():
    counts = torch.randint(0, 4, (2, BINS)).double()
    counts[:, 300:] *= torch.rand(2, BINS - 300) < 0.01
    actual = clipped_divergences(counts)
    for bins in (128, 129, 300, 1001, BINS):
        for row in range(2):
            assert actual[row, bins - LEVELS].item() == pytest.approx(divergence_by_loops(counts[row], bins), abs=1e-12)
    # a bell of width 1 and one value at 100: kept apart from it, the bell has 128 levels of its own
    x = torch.cat([torch.randn(20000).clamp(-3.5, 3.5), torch.tensor([100.0])])
    high = seen(EntropyObserver(), x)[1].item()
    assert 3 < high < 100 * LEVELS / BINS + 0.1


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_is_close_to_the_best_range(symmetric):
    """Rounding of the actual values, over all shares of the range in steps of 1 %."""
    x = torch.randn(100_000) + 0.2
    low, high, *whole = (
        limit for kind in (MSEObserver, AbsMaxObserver) for limit in seen(kind("tensor", symmetric), x)
    )

    def error(low, high):
        scale = (high - low) / 255
        zero = (low / scale).round()
        return (((x / scale).round().clamp(zero, zero + 255) * scale) - x).square().mean().item()

    best = min(error(whole[0] * share / 100, whole[1] * share / 100) for share in range(5, 101))
    assert error(low, high) < 1.05 * best < error(*whole)


def test_histograms_that_grow_stay_exact():
    """Batches of rising size double the limit; the counts are those of one batch."""
    x = torch.cat([torch.randn(40, 3) * 2.0**power for power in (-5, -1, 0, 4)])
    whole, grown = PercentileObserver("channel"), PercentileObserver("channel")
    for batch in x.split(40):
        grown.update(batch)
    whole.update(x[-40:])  # the largest first: its limit is at most that of the other
    whole.update(x[:-40])
    for observer in (whole, grown):
        assert (observer._state.counts.sum(1) == 160).all()
    coarse, fine = grown._state, whole._state
    for channel in range(3):
        edges = torch.linspace(-coarse.limit[channel], coarse.limit[channel], 2 * BINS + 1, dtype=torch.float64)
        expected = torch.histogram(x[:, channel].double(), edges)[0]
        assert torch.equal(coarse.counts[channel], expected.long())
        assert fine.limit[channel] >= x[:, channel].abs().max()


@pytest.mark.parametrize("kind", OBSERVERS)
def test_bad_input(kind):
    with pytest.raises(ValueError, match="granularity='row'"):
        kind("row")
    with pytest.raises(ValueError, match="no activations"):
        kind().range()
    observer = kind("channel")
    observer.update(torch.zeros(2, 0, 8))  # an expert without tokens
    observer.update(torch.zeros(2, 3, 8))
    assert all(torch.equal(limit.abs(), torch.zeros(8)) for limit in observer.range())
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            observer.update(torch.tensor([[bad] * 8]))
    with pytest.raises(ValueError, match="9 wide"):
        observer.update(torch.zeros(2, 9))
    with pytest.raises(ValueError, match="percentile=40"):
        PercentileObserver(percentile=40)
