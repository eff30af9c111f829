"""`estimate` of models with states beside keys and values, compressed latents, or attention classes of their own."""

import inspect

import pytest
import torch
import transformers
from encoder_decoder_models import random_weights
from helpers import tiny_config
from recurrent_models import MODELS, recurrent_model
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import CacheLayerMixin

import hf_efficient


BATCH, PROMPT, NEW = 2, 40, 6
_SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
_LATENTS = dict(
    **_SMALL, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4,
)  # fmt: skip
OTHERS = {
    "deepseek_v2": ("DeepseekV2Config", _LATENTS),
    "deepseek_v3": ("DeepseekV3Config", _LATENTS),
    "falcon": ("FalconConfig", _SMALL),
    "gptj": ("GPTJConfig", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)),
    "bloom": ("BloomConfig", dict(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)),
}

OWN_ATTENTION = ("falcon", "gptj", "bloom")


def model_of(name: str):
    if name in MODELS:
        return recurrent_model(name)
    kind, arguments = OTHERS[name]
    config = getattr(transformers, kind)(**arguments, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return random_weights(transformers.AutoModelForCausalLM.from_config(config))


def counted(run) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [*OTHERS, *(name for name in MODELS if "mamba" not in name)])
def test_flops_and_cache_are_those_of_the_model(name):
    model = model_of(name)
    found = hf_efficient.estimate(model.config, batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=NEW)
    assert found.notes == ("the config names no dtype: float32 is assumed",) * (model.config.dtype is None)
    assert found.parameters == model.num_parameters() and found.dtype == "float32"
    if name not in OWN_ATTENTION:
        model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    ids, cache = torch.randint(3, 100, (BATCH, PROMPT + NEW - 1)), hf_efficient.PagedCache(model.config)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    prefill = counted(lambda: model(ids[:, :PROMPT], past_key_values=cache, **keep))
    steps = [counted(lambda token=token: model(token, past_key_values=cache)) for token in ids[:, PROMPT:].split(1, 1)]
    if name not in OWN_ATTENTION:  # keys that the mask hides are not counted
        dims = 24 + 16 if "deepseek" in name else 2 * 16
        layers = sum(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
        prefill -= layers * 2 * BATCH * 4 * dims * PROMPT * (PROMPT - 1) // 2
    assert found.prefill.flops == pytest.approx(prefill, rel=1e-3)  # rotary frequencies and their like
    assert found.decode.flops == pytest.approx(sum(steps) / len(steps), rel=1e-3)
    states = [state for layer in cache.recurrent_layers for state in layer._states() if state is not None]
    assert found.kv_cache_bytes == cache.stats().bytes_allocated + sum(state.nbytes for state in states)
    assert 0 < found.activation_bytes and found.total_bytes > found.weight_bytes + found.kv_cache_bytes


def test_prompts_write_what_lies_behind_a_window():
    config = tiny_config("mistral", dtype="float32")
    found = hf_efficient.estimate(config, batch_size=BATCH, prompt_tokens=PROMPT, new_tokens=2)
    weights = found.prefill.bytes_moved - BATCH * PROMPT * found.kv_token_bytes
    assert weights == found.decode.bytes_moved - BATCH * config.sliding_window * found.kv_token_bytes
