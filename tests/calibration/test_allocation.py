"""OWL's sparsity of each block."""

import pytest
import torch

from hf_efficient import CalibrationConfig, SparseConfig
from hf_efficient.calibration.allocation import choose_sparsity
from hf_efficient.calibration.loading import prepare


TOKENS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_blocks_with_outliers_keep_more_and_the_average_stays(llama):
    names = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = [name for name in names if "lm_head" not in name]
    for name in inside:
        if ".1." in name:
            llama.get_submodule(name).weight[::5, ::5] *= 30
    chosen = choose_sparsity(llama, dict.fromkeys(names, 0.5), TOKENS, llama.model.layers)
    assert list(chosen) == names and chosen["lm_head"] == 0.5
    for name in inside:  # two blocks of one size lie at both ends of the span
        assert chosen[name] == pytest.approx(0.58 if ".0." in name else 0.42)
    sizes = {name: llama.get_submodule(name).weight.numel() for name in inside}
    assert sum(chosen[name] * size for name, size in sizes.items()) == pytest.approx(0.5 * sum(sizes.values()))
    assert not any(module._forward_pre_hooks for module in llama.modules())
    one = choose_sparsity(llama, dict.fromkeys(inside[:2], 0.5), TOKENS, llama.model.layers[:1])
    assert set(one.values()) == {0.5}  # nothing to share with


@pytest.mark.parametrize("sparsity", [0.02, 0.05, 0.95, 0.99])
def test_the_average_stays_where_the_span_does_not_fit(llama, sparsity):
    names = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear)][:14]
    for name in names:
        if ".1." in name:
            llama.get_submodule(name).weight.data[::5, ::5] *= 30
    kept = dict.fromkeys(names[:1], 0.0)
    chosen = choose_sparsity(llama, dict.fromkeys(names, sparsity) | kept, TOKENS, llama.model.layers)
    sizes = {name: llama.get_submodule(name).weight.numel() for name in names[1:]}
    average = sum(chosen[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert average == pytest.approx(sparsity) and chosen[names[1]] != chosen[names[-1]]
    assert chosen[names[0]] == 0, "it is not pruned"


def test_a_sparsity_that_leaves_owl_no_room_is_refused_by_name(llama):
    name = "model.layers.0.mlp.up_proj"
    config = SparseConfig(sparsity=0.5, allocation="owl", overrides={name: {"sparsity": 0.9995}})
    config.calibration = CalibrationConfig(tokens=TOKENS)
    with pytest.raises(
        ValueError, match=rf"{name}: sparsity=0.9995 is not supported with allocation='owl'.*below 0.999"
    ):
        prepare(config, {name: config.for_module(name)}, {}, llama)
