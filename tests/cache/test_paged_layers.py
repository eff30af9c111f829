"""PagedCache with layers out of the ordinary: shared keys, two head dims in one model, compressed latents."""

import pytest
import torch
from helpers import left_padded_batch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3nTextConfig, Gemma4TextConfig

from hf_efficient import PagedCache


SHARED = dict(
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=16,
    sliding_window=8,
    head_dim=16,
)
MORE_MODELS = {  # keys shared between layers, two head dims in one model, compressed latents
    "gemma3n": (
        Gemma3nTextConfig,
        dict(SHARED, intermediate_size=[96] * 4, laurel_rank=8, activation_sparsity_pattern=[0.0] * 4),
    ),
    "gemma4": (Gemma4TextConfig, dict(SHARED, intermediate_size=96, global_head_dim=32)),
    "deepseek": (
        DeepseekV3Config,
        dict(
            intermediate_size=96,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
            num_hidden_layers=2,
            num_key_value_heads=4,
        ),
    ),
}  # fmt: skip


def unusual_model(name):
    """A random model of one of `MORE_MODELS`, with weights large enough for attention that is far from uniform."""
    config_class, arguments = MORE_MODELS[name]
    config = config_class(
        **{"num_key_value_heads": 2, **arguments}, vocab_size=128, hidden_size=64, num_attention_heads=4,
        pad_token_id=0,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("name", MORE_MODELS)
def test_unusual_layers(name):
    model, inputs = unusual_model(name), left_padded_batch()
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=24, do_sample=False)
    expected = model.generate(**inputs, **options)
    for implementation in ("sdpa", "flash_paged"):
        model.set_attn_implementation(implementation)
        cache = PagedCache(model.config, block_size=8)
        assert torch.equal(model.generate(**inputs, **options, past_key_values=cache), expected), implementation
        assert cache.reads_pages == (implementation == "flash_paged" and name != "deepseek")
