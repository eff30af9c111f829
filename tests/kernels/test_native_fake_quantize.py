"""Fake quantization by the C++ kernel, in every tier, beside torch's operators."""

import pytest
import torch
from linear_checks import check_learned, learned

from hf_efficient import BitNetConfig, W8A8Config, WeightOnlyConfig, methods
from hf_efficient.compression.recovery.coded_weights import CodedWeight
from hf_efficient.kernels.linear.fake_quantize import FakeQuantizer
from hf_efficient.kernels.native import tiers


CONFIGS = {
    **{f"{bits} bits": WeightOnlyConfig(bits=bits, group_size=32, method="rtn") for bits in (2, 3, 4, 8)},
    "symmetric": WeightOnlyConfig(bits=4, group_size=32, symmetric=True, method="rtn"),
    "a group a row": WeightOnlyConfig(bits=4, group_size=-1, method="rtn"),
    "one group": WeightOnlyConfig(bits=4, group_size=None, symmetric=True, method="rtn"),
    "float zero points": WeightOnlyConfig(bits=4, group_size=32, method="hqq", zero_point="float"),
    "ternary": BitNetConfig(),
    "ternary rows": BitNetConfig(per_channel=True),
    "W8A8": W8A8Config(),
    "W8A8 with zero points": W8A8Config(method="zeropoint"),
}


def trained(config, columns: int, dtype: torch.dtype) -> CodedWeight:
    """A weight whose scales are zero in one group, and that has left its codes, some of them by far."""
    torch.manual_seed(0)
    weight = torch.randn(37, columns)
    weight[3, :32] = 0
    tensors = methods.quantize(weight.to(dtype), config.format(), config.method_name())
    made = CodedWeight(config.format(), tensors, columns, dtype, weight)
    with torch.no_grad():
        made.weight.add_(torch.randn_like(weight) * 0.3)
        made.weight[5, 7] = 1e9
        made.log_scale.add_(torch.randn_like(made.log_scale) * 0.1)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("two_threads")
def test_the_numbers_of_torchs_operators(name, dtype, tier, nan_poison, monkeypatch):
    columns = 100 if "bits" in name else 96  # the last group is short
    made = trained(CONFIGS[name], columns, dtype)
    gradient = torch.randn(37, columns).to(dtype)
    found = learned(made, dtype, gradient)
    assert made.quantizer(dtype)[0] is not None
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    assert made.quantizer(dtype)[0] is None
    check_learned(found, learned(made, dtype, gradient), gradient)


def test_arguments_that_do_not_fit_are_refused(tier):
    quantizer, weight = FakeQuantizer(0, 15, 32, torch.float32), torch.randn(4, 96)
    scale = torch.ones(4, 3)
    for wrong in (torch.ones(4, 2), torch.ones(3, 3), torch.ones(3)):
        with pytest.raises(ValueError, match=r"scale .* does not broadcast to \[4, 3\]"):
            quantizer.rounded(weight, wrong, 8.0, torch.float32)
        with pytest.raises(ValueError, match=r"zero .* does not broadcast to \[4, 3\]"):
            quantizer.rounded(weight, scale, wrong, torch.float32)
    rounded = quantizer.rounded(weight, scale, 8.0, torch.float32)
    for gradient in (torch.randn(4, 95), torch.randn(4, 96).bfloat16()):
        with pytest.raises(ValueError, match=r"gradient .* it must be torch.float32 \[4, 96\]"):
            quantizer.gradients(weight, scale, 8.0, rounded, gradient)
    with pytest.raises(ValueError, match="without gaps"):
        quantizer.gradients(weight, scale, 8.0, rounded.t().contiguous().t(), rounded)
    assert not quantizer.serves(weight.t(), torch.float32) and not quantizer.serves(weight, torch.float64)
    assert not FakeQuantizer(0, 15, 32, torch.float16).serves(weight, torch.bfloat16)
