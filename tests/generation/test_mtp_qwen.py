"""The MTP modules of Qwen3-Next and Qwen3.5, of which configs say nothing: read as published, or refused by name."""

import json

import pytest
import torch
from helpers import assert_close
from safetensors.torch import load_file, save_file
from test_mtp import CONFIGS, NAMES, ROWS, published
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache

from hf_efficient import MultiTokenPrediction, enable_speculation


pytestmark = NAMES


def reference(tensors: dict, config, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The module's logits [tokens, vocabulary] for int64 `tokens`, at positions 1, 2, ..., and the states `hidden`
    [tokens, size] that predicted them, from the checkpoint's tensors alone."""

    def weight(name):
        return tensors[f"mtp.{name}.weight"]

    def norm(x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (1 + weight(name))

    def multiply(x, name):
        return linear(x, weight(f"layers.0.{name}"))

    def expert(x, name):
        gate, up = (multiply(x, f"mlp.{name}.{part}_proj") for part in ("gate", "up"))
        return multiply(silu(gate) * up, f"mlp.{name}.down_proj")

    def turned(x):
        """x [heads, tokens, head_dim]: its first quarter turned by the position."""
        half = x.shape[-1] // 8
        angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(1, len(tokens) + 1)[:, None] * angles
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    embedded = tensors["model.embed_tokens.weight"][tokens]
    x = linear(
        torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")], -1), weight("fc")
    )
    y = norm(x, "layers.0.input_layernorm")
    heads = [
        multiply(y, f"self_attn.{part}_proj").unflatten(-1, (count, -1))
        for part, count in (("q", 4), ("k", 2), ("v", 2))
    ]
    (query, gate), key, value = heads[0].chunk(2, -1), *heads[1:]
    query, key = (norm(z, f"layers.0.self_attn.{part}_norm").transpose(0, 1) for z, part in ((query, "q"), (key, "k")))
    inputs = turned(query), turned(key), value.transpose(0, 1)
    attended = scaled_dot_product_attention(*(z[None] for z in inputs), is_causal=True, enable_gqa=True)[0]
    x = x + multiply((attended.transpose(0, 1) * gate.sigmoid()).flatten(1), "self_attn.o_proj")
    y = norm(x, "layers.0.post_attention_layernorm")
    if "mtp.layers.0.mlp.gate.weight" not in tensors:
        gate, up = (multiply(y, f"mlp.{part}_proj") for part in ("gate", "up"))
        return linear(norm(x + multiply(silu(gate) * up, "mlp.down_proj"), "norm"), tensors["lm_head.weight"])
    shares, chosen = multiply(y, "mlp.gate").softmax(-1).topk(config.num_experts_per_tok)
    routed = [
        sum(share * expert(token, f"experts.{index}") for share, index in zip(part / part.sum(), indices.tolist()))
        for token, part, indices in zip(y, shares, chosen)
    ]
    shared = multiply(y, "mlp.shared_expert_gate").sigmoid() * expert(y, "shared_expert")
    return linear(norm(x + torch.stack(routed) + shared, "norm"), tensors["lm_head.weight"])


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE"])
def test_logits_follow_from_the_published_tensors(tmp_path, name):
    """Of Qwen3.5 as it is published, beside a model of images, and with experts in one tensor."""
    target = published(tmp_path, name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if name != "Qwen3-Next":
        renamed = {key.replace("model.", "model.language_model."): tensor for key, tensor in tensors.items()}
        experts = "mtp.layers.0.mlp.experts."
        parts = {key: renamed.pop(key) for key in list(renamed) if key.startswith(experts)}
        if parts:
            down, gate, up = (
                torch.stack([parts[f"{experts}{index}.{part}_proj.weight"] for index in range(4)])
                for part in ("down", "gate", "up")
            )
            renamed |= {f"{experts}gate_up_proj": torch.cat([gate, up], 1), f"{experts}down_proj": down}
        save_file(renamed, path, metadata={"format": "pt"})
        whole = json.loads((tmp_path / "config.json").read_text())
        whole = {"model_type": whole["model_type"].removesuffix("_text"), "text_config": whole}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        target = enable_speculation(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    before = target.config.to_dict()
    heads = MultiTokenPrediction(target)
    assert target.config.to_dict() == before, "what the config does not say is said while the module is read"
    for row in ROWS:
        tokens, positions = torch.tensor(row[1:]), torch.arange(1, len(row))[None]
        hidden = target.model(torch.tensor([row[:-1]])).last_hidden_state
        cache = MtpCache(config=heads.module.config)
        inputs = dict(attention_mask=torch.ones_like(positions), position_ids=positions, mtp_cache=cache)
        found = heads.module(input_ids=tokens[None], last_hidden_states=hidden, **inputs)[1][0, -1]
        expected = reference(tensors, target.config, tokens, hidden[0])[-1]
        assert_close(found, expected, 1e-5, 1e-4, "float32 sums in another order")


def test_refusals(tmp_path):
    def refused(model, message):
        with pytest.raises(ValueError, match=message):
            enable_speculation(model).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, assistant_model="mtp")
        assert not hasattr(model.config, "num_mtp_layers")

    config = CONFIGS["Qwen3-Next"](vocab_size=128)
    refused(AutoModelForCausalLM.from_config(config), "Qwen3NextForCausalLM was not loaded from a checkpoint")
    published(tmp_path, "Qwen3-Next")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for missing, named in (
        ("mtp.fc.", "eh_proj"),
        ("mtp.layers.0.self_attn.q_norm.", "q_norm"),
        ("mtp.layers.0.mlp.experts.", "gate_up_proj"),
        ("mtp.", "post_norm"),
    ):
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(missing)}
        save_file(kept, path, metadata={"format": "pt"})
        refused(AutoModelForCausalLM.from_pretrained(tmp_path), f"holds no MTP module that can be read: .*{named}")
    config = CONFIGS["Qwen3-Next"](vocab_size=128, layer_types=["full_attention", "linear_attention"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "linear")
    linear_last = AutoModelForCausalLM.from_pretrained(tmp_path / "linear")
    refused(linear_last, "the last layer of Qwen3NextForCausalLM is 'linear_attention'")
    config = CONFIGS["Qwen3-Next"](vocab_size=128)
    config.mtp_num_hidden_layers = 2
    with pytest.raises(ValueError, match="has num_mtp_layers=None; models are taken whose config says 1"):
        model = AutoModelForCausalLM.from_config(config)
        enable_speculation(model).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, assistant_model="mtp")
