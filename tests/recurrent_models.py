"""Tiny random models of which some layers have a recurrent state."""

import torch
import transformers
from encoder_decoder_models import random_weights


_SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16,
    full_attention_interval=2,
)  # fmt: skip
# name -> (config class, its arguments)
MODELS = {
    "jamba": (
        "JambaConfig",
        dict(
            attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2, mamba_d_state=8,
            mamba_dt_rank=4, use_mamba_kernels=False,
        ),
    ),
    "bamba": (
        "BambaConfig",
        dict(
            attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2,
            mamba_chunk_size=8,
        ),
    ),
    "mamba": ("MambaConfig", dict(state_size=8, time_step_rank=4)),
    "falcon_mamba": ("FalconMambaConfig", dict(state_size=8, time_step_rank=4)),
    "mamba2": ("Mamba2Config", dict(state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention"], conv_L_cache=3)),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_EXPERTS, **_DELTA}),
    "qwen3_next": ("Qwen3NextConfig", {**_EXPERTS, **_DELTA}),
    "falcon_h1": (
        "FalconH1Config",
        dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8, head_dim=16),
    ),
}  # fmt: skip


def recurrent_model(name: str, attention: str = "sdpa", **overrides):
    """A random model, large enough in its weights that greedy decoding does not settle on one token."""
    kind, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**_SIZES, **arguments, **overrides})
    model = random_weights(transformers.AutoModelForCausalLM.from_config(config))
    if "mamba" not in name:
        model.set_attn_implementation(attention)
    return model
