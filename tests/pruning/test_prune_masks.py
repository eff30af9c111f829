"""Which weights are kept: exactly as many as asked for, in every group, the most important ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_efficient.pruning import available_methods, prune
from hf_efficient.pruning.mask import Sparsity


TARGETS = (
    Sparsity(0.5),
    Sparsity(0.7, group="layer"),
    Sparsity.of_pattern(2, 4),
    Sparsity.of_pattern(4, 8),
    Sparsity(0),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 5),
    target=st.one_of(
        st.builds(Sparsity, st.floats(0, 0.99), group=st.sampled_from(["row", "layer"])),
        st.integers(2, 9).flatmap(lambda m: st.builds(Sparsity.of_pattern, st.integers(1, m - 1), st.just(m))),
    ),
    levels=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_exactly_the_largest_are_kept_and_the_first_of_equal_ones(rows, groups, target, levels, seed):
    columns = groups * (target.pattern or (1, 3))[1]
    scores = torch.randint(levels, (rows, columns), generator=torch.Generator().manual_seed(seed))
    mask = target.mask(scores)
    assert mask.sum() == target.kept(rows, columns)
    count, kept = target.competitors(rows, columns)
    for own, chosen in zip(scores.reshape(-1, count).tolist(), mask.reshape(-1, count)):
        best = sorted(range(count), key=lambda i: (-own[i], i))[:kept]
        assert chosen.nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitude(target, dtype):
    weight = torch.randn(6, 16).to(dtype)
    pruned, mask = prune(weight, "magnitude", target)
    assert pruned.dtype is dtype and torch.equal(pruned, torch.where(mask, weight, 0))
    assert mask.sum() == target.kept(6, 16)
    count, _ = target.competitors(6, 16)
    kept = torch.where(mask, weight.abs(), torch.inf).reshape(-1, count).amin(1)
    assert (torch.where(mask, 0, weight.abs()).reshape(-1, count).amax(1) <= kept).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Sparsity(1.0), r"sparsity=1.0 .* at least 0 and below 1"),
        (lambda: Sparsity(-0.1), "sparsity=-0.1"),
        (lambda: Sparsity(True), "sparsity=True"),
        (lambda: Sparsity.of_pattern(4, 4), r"pattern=\(4, 4\).* 0 < n < m"),
        (lambda: Sparsity(0.5, (1, 4)), r"sparsity=0.5 .* must be 0.75 for pattern 1:4"),
        (lambda: Sparsity(0.5, group="column"), "group='column' .*'row', 'layer'"),
        (lambda: Sparsity(0.5, (2, 4), "layer"), "group='layer' .* 'row' with a pattern"),
        (lambda: prune(torch.ones(2, 6), "magnitude", Sparsity.of_pattern(2, 4)), "2:4 does not divide in_features=6"),
        (lambda: prune(torch.full((2, 4), torch.nan), "magnitude", Sparsity(0.5)), "8 values that are NaN"),
    ],
)
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_methods_are_found_by_file_name():
    assert "magnitude" in available_methods() and "mask" not in available_methods()
