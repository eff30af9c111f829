"""Hadamard transforms of any size are orthonormal and spread outliers; folded rotations change nothing."""

import dataclasses

import pytest
import torch
from helpers import assert_close, tiny_model
from sample_blocks import first_block

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.rotation import rotate_block
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.kernels.hadamard import factors, random_signs, rotate, unrotate_weight


SIZES = [1, 2, 3, 12, 16, 17, 20, 28, 36, 64, 96, 100, 172, 576, 768]
LARGE = [1000, 1028, 1536, 2048, 4304, 4864, 8192, 10944, 11008, 14336, 29568]


@pytest.mark.parametrize("columns", SIZES)
def test_the_rotation_is_orthonormal_and_has_an_inverse(columns):
    signs = random_signs(columns, seed=1)
    matrix = rotate(torch.eye(columns), signs).double()
    assert (matrix @ matrix.t() - torch.eye(columns)).abs().max() < 1e-6
    assert (unrotate_weight(torch.eye(columns), signs).double() - matrix.t()).abs().max() < 1e-6
    wide = rotate(torch.eye(columns, dtype=torch.float64), signs)
    assert (wide @ wide.t() - torch.eye(columns)).abs().max() < 1e-13


@pytest.mark.parametrize("columns", LARGE)
def test_large_rotations_keep_products_and_have_an_inverse(columns):
    signs = random_signs(columns, seed=1)
    x, y = torch.randn(2, 3, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, signs)
    assert_close(unrotate_weight(rotated, signs), x, rms=1e-13, maximum=1e-12, reason="float64 round trip")
    assert_close(rotated @ rotate(y, signs).t(), x @ y.t(), rms=1e-12, maximum=1e-9, reason="float64 products")


def unit_row(columns: int, index: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor([index]), columns).float()


@pytest.mark.parametrize("columns", [12, 20, 28, 36, 576, 768, 1536, 2048, 4864, 14336])
def test_where_a_hadamard_matrix_exists_every_entry_has_the_same_size(columns):
    spread = rotate(unit_row(columns, columns // 3), random_signs(columns)).abs() * columns**0.5
    assert spread.min() > 1 - 1e-5 and spread.max() < 1 + 1e-5


@pytest.mark.parametrize("columns", [3, 17, 100, 172, 1000, 11008])
def test_elsewhere_no_entry_is_larger_than_sqrt2(columns):
    rotated = rotate(unit_row(columns, columns // 3), random_signs(columns))
    assert rotated.abs().max() * columns**0.5 < 2**0.5 + 1e-5


def test_an_odd_part_too_large_is_left_in_blocks():
    assert factors(4 * 515) == (515, (4,))
    rotated = rotate(unit_row(2060, 6), random_signs(2060))
    assert rotated[0, 4:8].abs().tolist() == [0.5] * 4 and rotated.count_nonzero() == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x, signs = torch.randn(5, 576, generator=torch.Generator().manual_seed(0)).to(dtype), random_signs(576)
    expected = rotate(x.double(), signs).to(dtype)
    eps = torch.finfo(dtype).eps
    reason = "one rounding may fall on the other side"
    assert_close(rotate(x, signs).float(), expected.float(), rms=0.1 * eps, maximum=4 * eps, reason=reason)


def test_signs_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"signs \(8,\) do not fit 16 columns"):
        rotate(torch.ones(2, 16), random_signs(8))


def test_compiles_into_one_graph():
    x, signs = torch.randn(3, 96), random_signs(96)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, signs), rotate(x, signs))
    assert torch.equal(rotate(x, signs), compiled(x, signs))


def test_gradients_pass_through():
    x = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, random_signs(12)), x)


def test_outliers_are_spread():
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    weight[:, 7] *= 30
    weight[3, 100] = 200

    def incoherence(w):
        return (w.abs().max() * w.numel() ** 0.5 / w.norm()).item()

    assert incoherence(weight) > 50
    assert incoherence(rotate(weight, random_signs(576))) < 10


def rotated_block(name: str):
    """Block 0 of a tiny float64 model, every linear to be rotated online."""
    return first_block(tiny_model(name).double(), WeightOnlyConfig(group_size=32, rotate=True))


READERS = {
    "llama": "self_attn.o_proj",
    "qwen3": "self_attn.o_proj",
    "gemma2": "self_attn.o_proj",
    "opt": "self_attn.out_proj",
    "gpt2": "attn.c_proj",
}


@torch.no_grad()
@pytest.mark.parametrize("name", READERS)
def test_folded_heads_change_nothing_but_the_weights(name):
    block = rotated_block(name)
    reader = f"{block.name}.{READERS[name]}"
    outputs = [block.run(batch) for batch in range(2)]
    weights = {n: weight_of(m).clone() for n, m in block.linears.items()}
    formats, statistics = dict(block.formats), dict(block.statistics)
    rotate_block(block)
    for batch, expected in enumerate(outputs):
        assert_close(block.run(batch), expected, rms=1e-12, maximum=1e-10, reason="float64")
    assert block.formats == {**formats, reader: dataclasses.replace(formats[reader], rotation=False).inner}
    changed = {n for n, m in block.linears.items() if not torch.equal(weight_of(m), weights[n])}
    assert reader in changed and len(changed) == 2
    again = collect(block.run, 2, block.linears)
    for n in block.linears:
        reason = "float32 sums of equal rows"
        assert_close(block.statistics[n].hessian, again[n].hessian, rms=1e-5, maximum=1e-2, reason=reason)
    assert not torch.allclose(block.statistics[reader].hessian, statistics[reader].hessian, rtol=1e-2)


@torch.no_grad()
def test_what_does_not_ask_for_rotation_stays():
    block = rotated_block("llama")
    block.formats = {name: AffineFormat(4, 32, False) for name in block.linears}
    weights = {n: m.weight.clone() for n, m in block.linears.items()}
    rotate_block(block)
    assert all(torch.equal(block.linears[n].weight, weight) for n, weight in weights.items())


@torch.no_grad()
def test_a_rotated_format_is_undone_exactly_before_rounding():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 96, generator=generator), torch.randn(5, 96, generator=generator)
    signs = random_signs(96)
    reason = "float32 transforms of size 96"
    assert_close(rotate(x, signs) @ rotate(weight, signs).t(), x @ weight.t(), rms=1e-6, maximum=1e-4, reason=reason)
