"""k-means tables: near the exact optimum, never worse than round to nearest, sound where there is little to cluster."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_efficient import methods
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.methods import _gptq_codebook, kmeans, rtn


def least_error(values, weights, entries) -> float:
    """Exact weighted k-means of sorted values in one dimension: dynamic programming over all borders, in float64."""
    values, weights = values.double().numpy(), weights.double().numpy()
    moments = [np.concatenate([[0], np.cumsum(weights * values**power)]) for power in range(3)]
    mass, first, second = (moment[None] - moment[:, None] for moment in moments)
    cost = np.where(mass > 0, second - first**2 / np.where(mass > 0, mass, 1), 0)
    cost[np.tril_indices(len(cost), -1)] = np.inf
    least = cost[0]
    for _ in range(entries - 1):
        least = (least[:, None] + cost).min(0)
    return least[-1]


def error(values, table, weights):
    return ((values[:, :, None] - table[:, None]).abs().amin(2).double().square() * weights).sum(1)


@pytest.mark.parametrize("entries", [4, 8, 16])
@pytest.mark.parametrize("heavy_tails", [False, True])
def test_near_the_exact_optimum(entries, heavy_tails):
    torch.manual_seed(0)
    values = torch.randn(12, 300)
    if heavy_tails:
        values /= torch.rand(12, 300).sqrt()
    values, weights = values.sort().values, torch.rand(12, 300) ** 2
    found = error(values, kmeans.cluster(values, weights, entries), weights)
    ratio = found / torch.tensor([least_error(*row, entries) for row in zip(values, weights)])
    assert ratio.min() > 1 - 1e-6 and ratio.mean() < 1.02


def weighted_error(format, tensors, weight, importance):
    difference = format.dequantize(tensors, weight.shape[1], torch.float64) - weight.double()
    return (difference.square() * importance).sum()


KINDS = {
    "normal": lambda weight: weight,
    "positive": lambda weight: weight.abs() + 1,
    "rounded": lambda weight: (2 * weight).round(),
    "outlier": lambda weight: torch.cat([torch.full((1,), 100.0), weight.flatten()[1:]]).view_as(weight),
}


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    bits=st.sampled_from([2, 3, 4]),
    group_size=st.sampled_from([-1, None]),
    kind=st.sampled_from(list(KINDS)),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_never_worse_than_round_to_nearest(rows, columns, bits, group_size, kind, weighted, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = KINDS[kind](torch.randn(rows, columns, generator=generator))
    importance = torch.rand(columns, generator=generator) + 0.01 if weighted else torch.ones(columns)
    format, grid = CodebookFormat("kmeans", bits, group_size), AffineFormat(bits, group_size, False)
    ours = weighted_error(
        format, kmeans.quantize(weight, format, SimpleNamespace(mean_square=importance)), weight, importance
    )
    theirs = weighted_error(grid, rtn.quantize(weight, grid), weight, importance)
    slack = 1e-10 * weight.abs().max() ** 2 * weight.numel()
    if group_size is None:  # weights are counted in 2^14 bins
        slack += 1e-3 * theirs + (weight.abs().max() * 3 / 2**14) ** 2 * weight.numel()
    assert ours <= theirs + slack


@pytest.mark.parametrize("group_size", [-1, None])
def test_few_values_are_kept(group_size):
    """No more values than entries: no error, wherever the values lie."""
    weight = torch.tensor([[0.0] * 60 + [0.5, -1.0, 7.0, 7.0], [3.0] * 64])
    format = CodebookFormat("kmeans", 3, group_size)
    tensors = kmeans.quantize(weight, format)
    assert (format.dequantize(tensors, 64, torch.float32) - weight).abs().max() < 1e-6


def test_empty_clusters_find_work():
    """Both starts put nearly all entries where nothing is; a move a step brings them back."""
    values = torch.cat([torch.linspace(0, 1e-3, 200), torch.tensor([1e4])])[None]
    weights = torch.ones_like(values)
    found = error(values, kmeans.cluster(values, weights, 16), weights)
    assert found < 2 * least_error(values[0], weights[0], 16)


@pytest.mark.parametrize("format", [CodebookFormat("kmeans", 3, group) for group in (-1, 32, None)], ids=str)
def test_weights_of_inputs_move_the_table(format):
    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    importance = torch.rand(128) ** 4 * 1e6
    importance[5] = 0  # an input that is always 0
    plain = weighted_error(format, kmeans.quantize(weight, format), weight, importance)
    aware = kmeans.quantize(weight, format, SimpleNamespace(mean_square=importance))
    assert weighted_error(format, aware, weight, importance) < 0.95 * plain
    assert format.dequantize(aware, 128, torch.float32).isfinite().all()


def test_groups_are_fitted_in_turns():
    """One table with a scale a group beats one table with the plain largest magnitudes for scales."""
    torch.manual_seed(0)
    weight = torch.randn(32, 256) * torch.rand(32, 1).exp()
    format, nf4 = CodebookFormat("kmeans", 4, 64), CodebookFormat("nf4", 4, 64)
    ones = torch.ones(256)
    ours = weighted_error(format, kmeans.quantize(weight, format), weight, ones)
    assert ours < 0.85 * weighted_error(nf4, nf4.round(weight), weight, ones)


def test_chunks_do_not_change_the_result(monkeypatch):
    weight, format = torch.randn(40, 64), CodebookFormat("kmeans", 4, -1)
    whole = kmeans.quantize(weight, format)
    monkeypatch.setattr(kmeans, "_ELEMENTS_AT_ONCE", 64 * 7)
    assert all(torch.equal(whole[name], tensor) for name, tensor in kmeans.quantize(weight, format).items())


@pytest.mark.parametrize("power", [-110, 123])
@pytest.mark.parametrize("format", [CodebookFormat("kmeans", 3, 32, True), CodebookFormat("nf4", 4, 32, True)], ids=str)
def test_weights_whose_squares_overflow_or_vanish_get_the_same_codes(format, power):
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    expected, found = (
        methods.quantize(own, format, "kmeans" if format.codebook == "kmeans" else "rtn")
        for own in (weight, weight * 2.0**power)
    )
    assert torch.equal(found["qweight"], expected["qweight"]) and torch.equal(
        found["scale_codes"], expected["scale_codes"]
    )
    whole = [format.dequantize(tensors, 96, torch.float32) for tensors in (found, expected)]
    assert torch.equal(whole[0], whole[1] * 2.0**power)


def test_fixed_tables_are_refused():
    with pytest.raises(ValueError, match="codebook='nf4'"):
        kmeans.quantize(torch.randn(4, 64), CodebookFormat("nf4", 4, 64))
    with pytest.raises(ValueError, match="method='kmeans'"):
        CodebookFormat("kmeans", 4, 64).round(torch.randn(4, 64))


@pytest.mark.parametrize(
    "format",
    [
        CodebookFormat("nf4", 4, 32),
        CodebookFormat("fp4", 4, -1),
        CodebookFormat("nf4", 4, 32, True),
        *(CodebookFormat("kmeans", 3, group) for group in (-1, 32, None)),
    ],
    ids=str,
)
def test_feedback_lowers_the_output_error(format):
    """GPTQ's rounding to a codebook: below the nearest entries on the calibration inputs, on no row above them."""
    torch.manual_seed(0)
    weight = torch.randn(24, 80)
    x = torch.randn(200, 80) @ torch.randn(80, 80) / 9
    hessian = x.t() @ x
    tensors = _gptq_codebook.quantize(weight, format, SimpleNamespace(hessian=hessian))
    codes = format.nearest(weight, format.scale(tensors), format.table(tensors))
    nearest = {**tensors, "qweight": format.pack(codes)}
    differences = (format.dequantize(chosen, 80, torch.float64) - weight.double() for chosen in (tensors, nearest))
    ours, theirs = ((difference @ x.t().double()).square().sum(1) for difference in differences)
    assert ours.sum() < 0.8 * theirs.sum() and (ours <= 1.0001 * theirs).all()


@pytest.mark.parametrize("group_size", [16, -1])
def test_gptq_learns_tables_for_a_huge_input(group_size):
    """Its mean square is 10^8 times that of the others, the damping 10^4 times."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, 48, generator=generator), torch.randn(16, 48, generator=generator)
    x[:, 7] *= 1e4
    inputs = SimpleNamespace(hessian=x.T @ x, mean_square=x.square().mean(0))
    format, errors = CodebookFormat("kmeans", 3, group_size), []
    for method in (_gptq_codebook, kmeans):
        change = weight - format.dequantize(method.quantize(weight, format, inputs), 48, torch.float32)
        errors.append((x.double() @ change.double().T).square().sum())
    assert errors[0] < 1.05 * errors[1]
