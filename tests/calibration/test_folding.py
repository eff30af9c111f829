"""Scales between linears and what feeds them: found on every architecture, exact, and refused where they would not be."""

import pytest
import torch
import transformers
from helpers import TINY_MODELS, assert_close, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import Block
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.folding import Folding, weight_of
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.configs import WeightOnlyConfig


SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
MLP = dict(intermediate_size=128)
FALCON = dict(new_decoder_architecture=True, num_kv_heads=2)
MLA = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=8, first_k_dense_replace=2
)
OTHERS = {
    "bert": ("BertModel", dict(**SMALL, **MLP)),
    "phi3": ("Phi3Model", dict(**SMALL, **MLP, num_key_value_heads=2, pad_token_id=0)),
    "gpt_neox": ("GPTNeoXModel", dict(**SMALL, **MLP)),
    "falcon": ("FalconModel", dict(**SMALL, **FALCON)),
    "deepseek_v3": ("DeepseekV3Model", dict(**SMALL, **MLP, **MLA)),
    "t5": ("T5EncoderModel", dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=128)),
}
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
    "t5": {"q": "layer_norm", "o": "v", "wi": "layer_norm", "wo": "wi"},
}


def make(name: str, dtype=torch.float64, **overrides):
    if name in TINY_MODELS:
        model = tiny_model(name, dtype, **overrides)
        if "num_local_experts" in TINY_MODELS[name][1]:
            model.set_experts_implementation("eager")  # the others know no float64
    else:
        class_name, arguments = OTHERS[name]
        cls = getattr(transformers, class_name)
        torch.manual_seed(0)
        model = cls(cls.config_class(**{**arguments, **overrides})).to(dtype).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that are not all ones, biases that are not all zeros
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def first_block(model, config=None) -> Block:
    """The first block with its statistics, as `calibrate` hands it to a transform."""
    generator = torch.Generator().manual_seed(2)
    batches = [dict(input_ids=torch.randint(3, 128, (2, 24), generator=generator)) for _ in range(2)]
    names = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    chain = (followed := BlockwiseModel(model, batches, names)).chains[0]
    linears = {name: model.get_submodule(name) for name in chain.linears[0]}
    block = Block(chain.names[0], chain.modules[0], linears, {}, chain, 0, followed.record(chain))
    block.schemes = dict.fromkeys(linears, config or WeightOnlyConfig(group_size=32))
    block.formats = {name: scheme.format() for name, scheme in block.schemes.items()}
    block.statistics = collect(block.run, len(batches), linears)
    return block


@torch.no_grad()
def outputs(block: Block) -> torch.Tensor:
    return torch.cat([block.run(batch) for batch in range(len(block.inputs))])


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
    assert torch.equal(
        producer.pool(torch.arange(64.0), "amax").view(2, 2, 16)[:, 0], torch.arange(64.0).view(2, 2, 16)[:, 1]
    )


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
    before = {name: tensor.clone() for name, tensor in block.module.state_dict().items()}
    folding = Folding(block)
    assert find(block, folding, "gate_proj")[1] is None
    assert find(block, folding, "down_proj")[1] is not None, "what is not quantized can still take a scale"
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.module.state_dict().items())


def test_a_fold_that_overflows_is_undone():
    block = first_block(make("llama", torch.float16))
    before, state = outputs(block), {name: t.clone() for name, t in block.module.state_dict().items()}
    folding = Folding(block)
    names, producer = find(block, folding, "q_proj")
    scale = torch.ones(64)
    scale[3] = 1e-6
    assert not folding.apply(names, producer, scale)
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.module.state_dict().items())
    assert torch.equal(outputs(block), before) and all(block.formats[name].input_scale for name in names)
