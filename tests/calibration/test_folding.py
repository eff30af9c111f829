"""Scales between linears and their producers: found on every architecture, exact, refused where they would not be."""

import pytest
import torch
from helpers import assert_close
from sample_blocks import first_block, make, outputs, state_of

from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.folding import Folding


LLAMA = {
    "q_proj": "input_layernorm",
    "o_proj": "v_proj",
    "gate_proj": "post_attention_layernorm",
    "down_proj": "up_proj",
}
# last part of the name of the first linear of a site -> that of what its scale is folded into
FOLDS = {
    "llama": LLAMA,
    "llama_tied": LLAMA,
    "qwen3": LLAMA,
    "gemma2": {**LLAMA, "gate_proj": "pre_feedforward_layernorm"},
    "gemma3": {**LLAMA, "gate_proj": "pre_feedforward_layernorm"},
    "mixtral": {"q_proj": "input_layernorm", "o_proj": "v_proj"},
    "opt": {"q_proj": "self_attn_layer_norm", "out_proj": "v_proj", "fc1": "final_layer_norm", "fc2": "fc1"},
    "gpt2": {"c_attn": "ln_1", "attn.c_proj": "c_attn", "c_fc": "ln_2", "mlp.c_proj": None},
    "bert": {"query": None, "attention.output.dense": "value", "intermediate.dense": None, "0.output.dense": None},
    "phi3": {
        "qkv_proj": "input_layernorm",
        "o_proj": "qkv_proj",
        "gate_up_proj": "post_attention_layernorm",
        "down_proj": "gate_up_proj",
    },
    "gpt_neox": {
        "query_key_value": "input_layernorm",
        "attention.dense": "query_key_value",
        "dense_h_to_4h": "post_attention_layernorm",
        "dense_4h_to_h": None,
    },
    "falcon": {
        "query_key_value": "ln_attn",
        "self_attention.dense": "query_key_value",
        "dense_h_to_4h": "ln_mlp",
        "dense_4h_to_h": None,
    },
    "deepseek_v3": {
        "q_a_proj": "input_layernorm",
        "q_b_proj": "q_a_layernorm",
        "kv_b_proj": "kv_a_layernorm",
        "o_proj": "kv_b_proj",
        "gate_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "qwen3_next": {
        "in_proj_qkvz": "input_layernorm",
        "out_proj": "norm",
        "gate_proj": "post_attention_layernorm",
        "down_proj": "up_proj",
    },
    "t5": {"q": "layer_norm", "o": "v", "wi": "layer_norm", "wo": "wi"},
}


def scales(block: Block, names: list[str], producer, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(block.statistics[names[0]].in_features, generator=generator))
    return scale if producer is None else producer.pool(scale, "mean")


def find(block: Block, folding: Folding, name: str) -> tuple[list[str], object]:
    names = next(names for names in folding.sites() if names[0].endswith(name))
    return names, folding.producer(names)


@pytest.mark.parametrize("name", FOLDS)
def test_folds_of_every_architecture(name):
    model = make(name)
    block = first_block(model)
    before, folding, found = outputs(block), Folding(block), {}
    for names in folding.sites():
        producer = folding.producer(names)
        expected = next(key for key in FOLDS[name] if names[0].endswith("." + key))
        module = producer and next(n for n, m in block.module.named_modules() if m is producer.module)
        found[expected] = producer and module.split(".")[-1]
        scale, weights = scales(block, names, producer), [weight_of(block.linears[n]).clone() for n in names]
        assert folding.apply(names, producer, scale) == (producer is not None)
        for linear, weight in zip(names, weights):
            if producer is None:
                assert block.formats[linear].input_scale
                torch.testing.assert_close(block.transforms[linear]["input_scale"], 1 / scale)
                assert torch.equal(weight_of(block.linears[linear]), weight)
            else:
                assert not hasattr(block.formats[linear], "inner")
                assert_close(weight_of(block.linears[linear]), weight * scale, 1e-6, 1e-4, "float32 scales")
    assert found == FOLDS[name]
    # norms of RMS type compute in float32, where a last bit may fall the other way
    exact = 1e-12 if name in ("opt", "gpt2", "bert", "gpt_neox", "falcon") else 1e-6
    assert_close(outputs(block), before, exact, 1e-4, "only the order of products differs")
    again = collect(block.run, len(block.inputs), block.linears)
    for linear, inputs in again.items():
        for field in ("absmax", "mean_abs", "hessian"):
            now, seen = getattr(block.statistics[linear], field), getattr(inputs, field)
            assert_close(now, seen, 1e-5, 1e-3 * seen.abs().max().item(), "float32 sums, scaled after or before")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_folds_hold_in_bfloat16(name):
    block = first_block(make(name, torch.bfloat16))
    before, folding = outputs(block), Folding(block)
    folded = [folding.apply(n, p := folding.producer(n), scales(block, n, p)) for n in folding.sites()]
    assert sum(folded) == (2 if name == "qwen3_moe" else 4 if name != "gpt2" else 3)
    difference = (outputs(block) - before).double().norm(dim=-1) / before.double().norm(dim=-1)
    assert difference.median() < 2**-6, "a few roundings to 8 bits; a token may change its expert"


def test_grouped_heads_share_a_scale():
    block = first_block(make("llama"))
    names, producer = find(block, Folding(block), "o_proj")
    pooled = producer.pool(torch.arange(64.0), "mean").view(2, 2, 16)  # key-value head, head in its group, channel
    assert torch.equal(pooled[:, 0], pooled[:, 1])
    assert torch.equal(pooled[:, 0], torch.arange(64.0).view(2, 2, 16).mean(1))
    largest = producer.pool(torch.arange(64.0), "amax").view(2, 2, 16)
    assert torch.equal(largest[:, 0], torch.arange(64.0).view(2, 2, 16)[:, 1])


def test_gelu_is_not_homogeneous_and_relu_is():
    for activation, expected in (("relu", True), ("gelu", False)):
        block = first_block(make("opt", activation_function=activation))
        assert (find(block, Folding(block), "fc2")[1] is not None) == expected


def test_a_second_reader_that_is_not_scaled_forbids_the_fold():
    block = first_block(make("llama"))
    assert find(block, Folding(block), "gate_proj")[1] is not None
    left_out = next(name for name in block.linears if name.endswith("up_proj"))
    for part in (block.linears, block.statistics, block.formats):
        del part[left_out]
    before, folding = state_of(block.module), Folding(block)
    assert find(block, folding, "gate_proj")[1] is None
    assert find(block, folding, "down_proj")[1] is not None, "what is not quantized can still take a scale"
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.module.state_dict().items())


def test_a_fold_that_overflows_is_undone():
    block = first_block(make("llama", torch.float16))
    before, state = outputs(block), state_of(block.module)
    folding = Folding(block)
    names, producer = find(block, folding, "q_proj")
    scale = torch.ones(64)
    scale[3] = 1e-6
    assert not folding.apply(names, producer, scale)
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.module.state_dict().items())
    assert torch.equal(outputs(block), before) and all(block.formats[name].input_scale for name in names)
