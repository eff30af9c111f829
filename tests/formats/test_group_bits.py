"""SliM-LLM: bits a group."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from format_checks import check_declared
from helpers import assert_close
from torch import nn

from hf_efficient import methods
from hf_efficient.calibration.refine import tuned_weight
from hf_efficient.compression.recovery.coded_weights import coded_weight
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.methods._error_feedback import output_error
from hf_efficient.methods.slim_llm import allocation


def case(columns, dtype=torch.float32):
    """(a weight, the Hessian of inputs of which the first 32 are much larger)"""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(512, 24, generator=generator) @ torch.randn(24, columns, generator=generator)
    x = mixed + torch.randn(512, columns, generator=generator)
    x[:, :32] *= 8
    return torch.randn(40, columns, generator=generator).to(dtype), x.t() @ x


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("columns", [256, 200])  # 200: with a short last group
def test_a_weight_in_the_format(bits, columns):
    format, (weight, hessian) = GroupBitsFormat(bits, 32), case(columns, torch.bfloat16)
    tensors = methods.quantize(weight, format, "slim_llm", SimpleNamespace(hessian=hessian))
    check_declared(format, tensors, 40, columns)
    format.check(tensors, columns)
    groups = tensors["group_bits"].tolist()
    assert groups[0] == bits + 1 and sum(groups) == bits * len(groups)
    # by Python's integers: the stream of a row, group after group
    dense = format.dequantize(tensors, columns, torch.float64)
    for row in (0, 39):
        stream = sum(byte << 8 * place for place, byte in enumerate(tensors["qweight"][row].tolist()))
        for column in range(columns):
            group, own = column // 32, groups[column // 32]
            code = stream & (1 << own) - 1
            stream >>= own
            expected = (code - int(tensors["zero_point"][row, group])) * tensors["scale"][row, group].double()
            assert dense[row, column] == expected
    x = torch.randn(3, columns).bfloat16()
    layout = format.layout(tensors, columns, torch.bfloat16)
    assert not layout.replaces_qweight or torch.equal(layout.canonical(), tensors["qweight"])
    assert_close(layout.matmul(x), x.double() @ dense.t(), 0.01, 0.3, "bfloat16 results")
    with pytest.raises(ValueError, match="group_bits"):
        format.check({**tensors, "group_bits": tensors["group_bits"].flip(0) + 1}, columns)
    with pytest.raises(ValueError, match="bits a group"):
        coded_weight(format, tensors, columns, torch.bfloat16)
    with pytest.raises(ValueError, match="zero_point"):
        format.check({**tensors, "zero_point": tensors["zero_point"] + 16}, columns)


def test_it_takes_the_bits_of_all_groups():
    assert GroupBitsFormat(3, 64).bits_per_weight(576, 1536, torch.bfloat16) == 3 + 24 / 64 + 8 / 64 / 576


def test_the_output_error_is_lower_than_with_equal_bits():
    weight, hessian = case(256)
    inputs, errors = SimpleNamespace(hessian=hessian), []
    for format, method in ((GroupBitsFormat(3, 32), "slim_llm"), (AffineFormat(3, 32, False), "gptq")):
        rounded = format.dequantize(methods.quantize(weight, format, method, inputs), 256, torch.float32)
        errors.append(output_error(weight, rounded, hessian).sum())
    assert errors[0] < 0.7 * errors[1]


def test_refinement_moves_codes_of_each_group_within_its_bits():
    format, (weight, hessian) = GroupBitsFormat(3, 32), case(200)
    tensors = methods.quantize(weight, format, "slim_llm", SimpleNamespace(hessian=hessian))
    module = nn.Linear(200, 40, bias=False)
    module.weight.data.copy_(weight)
    tuned = tuned_weight(module, format, tensors)
    assert torch.equal(tuned.tensors()["qweight"], tensors["qweight"])
    dense = format.dequantize(tensors, 200, torch.float32)
    torch.testing.assert_close(tuned(), dense)
    optimizer = torch.optim.Adam(tuned.groups())
    for group, rate in zip(optimizer.param_groups, (0.3, 0.05)):  # far enough to reach the ends
        group["lr"] = rate
    for _ in range(20):
        optimizer.zero_grad()
        (tuned() - 2 * dense).square().sum().backward()
        optimizer.step()
    after = tuned.tensors()
    format.check(after, 200)
    moved = format.codes(after, 200).split(32, 1)
    assert all(codes.max() <= levels for codes, levels in zip(moved, format.levels_of(after)))
    torch.testing.assert_close(format.dequantize(after, 200, torch.float32), tuned().detach())
    assert (tuned() - 2 * dense).norm() < 0.7 * dense.norm()


def test_bits_go_where_they_save_most():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.rand(3, 6, generator=generator).sort(0, descending=True).values
        best = min(
            sum(costs[1 + c, g].item() for g, c in enumerate(each))
            for each in itertools.product((-1, 0, 1), repeat=6)
            if sum(each) == 0 and each[5] == 0
        )
        change = allocation(costs, 5)
        assert change.sum() == 0 and change[5] == 0
        assert costs[change + 1, torch.arange(6)].sum().item() == pytest.approx(best, rel=1e-5)
