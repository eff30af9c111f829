"""Refinement of pruned blocks lowers the error of their outputs and moves no zero."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model
from sample_blocks import first_block, stored, stored_error
from transformers import AutoModelForCausalLM

from hf_efficient import SparseConfig, WeightOnlyConfig
from hf_efficient.calibration import refine_sparse
from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format
from hf_efficient.layers import EfficientLinear
from hf_efficient.pruning import prune
from hf_efficient.pruning.mask import Sparsity


def _block(name: str, format, target: Sparsity, dtype=torch.float32) -> tuple[Block, list]:
    """The first block of a tiny model pruned by magnitude, and its original outputs."""
    config = SimpleNamespace(refine=True, format=lambda: format)
    block = first_block(tiny_model(name, dtype), config, 8, statistics=False)
    for linear, module in block.linears.items():
        block.tensors[linear] = format.pack(*prune(weight_of(module), "magnitude", target))
    with torch.no_grad():
        return block, [block.run(batch) for batch in range(8)]


@pytest.mark.parametrize(
    "name, format, target, dtype",
    [
        ("llama", Sparse24Format(), Sparsity.of_pattern(2, 4), torch.bfloat16),
        ("gpt2", BitmapFormat(None, 0.5, None, "layer"), Sparsity(0.5, group="layer"), torch.float32),  # Conv1D
    ],
)
def test_kept_weights_fit_better_and_zeros_stay(name, format, target, dtype):
    block, targets = _block(name, format, target, dtype)
    untouched, *others = block.linears
    block.schemes[untouched] = SimpleNamespace(refine=False)
    before, start = stored_error(block, targets), stored(block)
    weights = {n: m.weight.clone() for n, m in block.linears.items()}
    refine_sparse.refine_sparse_block(block, targets, epochs=8)
    assert stored_error(block, targets) < 0.85 * before
    for linear, module in block.linears.items():
        assert torch.equal(module.weight, weights[linear]) and "forward" not in vars(module)
        for key, tensor in block.tensors[linear].items():
            same = torch.equal(tensor, start[linear][key])
            assert tensor.dtype == start[linear][key].dtype and same == (key != "qweight" or linear == untouched)


def test_values_that_only_get_worse_are_not_taken(monkeypatch):
    block, targets = _block("llama", Sparse24Format(), Sparsity.of_pattern(2, 4))
    start = stored(block)
    monkeypatch.setattr(refine_sparse, "RATE", 10.0)
    refine_sparse.refine_sparse_block(block, targets)
    assert all(torch.equal(block.tensors[n][key], start[n][key]) for n in start for key in start[n])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_kept_weights_are_refined_before_they_become_codes(name, tmp_path):
    dense = tiny_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 1}).eval()
    dense.save_pretrained(tmp_path)
    tokens = torch.randint(3, 128, (32, 16), generator=torch.Generator().manual_seed(1))
    error = {}
    for refine in (False, True):
        weights = WeightOnlyConfig(bits=4, group_size=32, method="gptq")
        scheme = dict(pattern="2:4", method="alps", refine=refine, weights=weights)
        config = SparseConfig(**scheme, calibration={"tokens": tokens})
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        for module in model.modules():
            if isinstance(module, EfficientLinear):
                assert module.format == config.format()
                codes, mask = module.format.codes(module.canonical(), module.in_features)
                assert codes.dtype == torch.uint8 and (mask.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
        with torch.no_grad():
            error[refine] = (model(tokens).logits - dense(tokens).logits).norm()
    assert error[True] < 0.95 * error[False]


@pytest.mark.parametrize("left_out", [[], ["self_attn"]])
def test_pruned_experts_are_not_tuned_and_a_warning_says_so(left_out, tmp_path, monkeypatch):
    tiny_model("mixtral").save_pretrained(tmp_path)
    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(1))
    scheme = dict(sparsity=0.5, method="magnitude", calibration={"tokens": tokens}, modules_to_not_convert=left_out)
    states, warnings = {}, set()
    monkeypatch.setattr(refine_sparse.logger, "warning_once", warnings.add)
    for refine in (False, True):
        config = SparseConfig(**scheme, refine=refine)
        states[refine] = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).state_dict()
        assert len(warnings) == refine
    assert "refine=True tunes no pruned fused experts" in warnings.pop()
    changed = {key for key, tensor in states[False].items() if not torch.equal(tensor, states[True][key])}
    assert all("self_attn" in key for key in changed) and bool(changed) != bool(left_out)
