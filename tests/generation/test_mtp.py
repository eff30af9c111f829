"""The multi-token-prediction module of a model's own checkpoint: transformers' logits, in batches, and lossless."""

from pathlib import Path

import pytest
import torch
from draft_models import fixed
from helpers import assert_close, left_padded_batch, needs_transformers, tiny_model
from hub_directory import serving
from native_loop import transformers_loop
from safetensors.torch import load_file, save_file
from test_drafters import append, sequences_of
from test_speculative_distribution import RIGHT, p_value
from torch.nn.functional import pad
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MellumConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import MtpCache

from hf_efficient import MultiTokenPrediction, WeightOnlyConfig, enable_speculation
from hf_efficient.generation.drafters import eagle_tree, mtp


TOKENS = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, max_position_embeddings=256)
EXPERTS = dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1)
SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, first_k_dense_replace=1)
LATENTS = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16,
    num_key_value_heads=2, full_attention_interval=2,
)  # fmt: skip
SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
CONFIGS = {
    "GLM-4.5": lambda **more: Glm4MoeConfig(
        **{**TOKENS, **EXPERTS, **SIZES, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, **more}
    ),
    "DeepSeek-V3": lambda **more: DeepseekV3Config(
        **{**TOKENS, **EXPERTS, **SIZES, "num_key_value_heads": 4, **LATENTS, **more}
    ),
    "Mellum": lambda **more: MellumConfig(
        **{**TOKENS, **SIZES, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4},
        **{"num_experts_per_tok": 2, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
        **{"num_mtp_layers": 1, **more},
    ),
    "Qwen3-Next": lambda **more: Qwen3NextConfig(**{**TOKENS, **SIZES, **DELTA, **SHARED, **more}),
    "Qwen3.5": lambda **more: Qwen3_5TextConfig(**{**TOKENS, **SIZES, **DELTA, **more}),
    "Qwen3.5 MoE": lambda **more: Qwen3_5MoeTextConfig(**{**TOKENS, **SIZES, **DELTA, **SHARED, **more}),
}
# what stands beside the layer has the names of Qwen3-Next's checkpoint
ONE_LEVEL_UP = ("Mellum", "Qwen3-Next", "Qwen3.5", "Qwen3.5 MoE")
NAMES = needs_transformers("5.20", "the names of Qwen3-Next's MTP module")
ROWS = [[5, 9, 30, 77, 12, 4, 99, 100], [8, 3, 21, 54, 60], [17, 90, 91, 92, 13, 14]]


def published(folder: Path, name: str, **sizes):
    """A random model with an MTP module as these models publish theirs: as one more layer, with copies of what it
    shares."""
    config = CONFIGS[name](**{"vocab_size": 128, **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator, size = torch.Generator().manual_seed(1), config.hidden_size

    def random(shape):
        numbers = torch.randn(shape, generator=generator)
        return numbers * 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else ("Qwen" not in name) + 0.2 * numbers

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(random(parameter.shape) * (5 if "embed" in key else 1))
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, last = load_file(path), config.num_hidden_layers
    before = next(key for key in tensors if "embed_tokens" in key).replace("embed_tokens.weight", f"layers.{last - 1}.")
    own, norms = f"model.layers.{last}.", ("enorm", "hnorm", "shared_head.norm")
    if name in ONE_LEVEL_UP:
        own, norms = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    layer = "mtp.layers.0." if name in ONE_LEVEL_UP else own
    extra = {
        key.replace(before, layer): random(value.shape) for key, value in tensors.items() if key.startswith(before)
    }
    extra |= {f"{own}{norm}.weight": random((size,)) for norm in norms}
    extra |= {f"{own}{'fc' if name in ONE_LEVEL_UP else 'eh_proj'}.weight": random((size, 2 * size))}
    if name not in ONE_LEVEL_UP:
        extra |= {f"{own}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        extra |= {f"{own}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file({**tensors, **extra}, path, metadata={"format": "pt"})
    return enable_speculation(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.fixture(
    scope="module", params=["GLM-4.5", "DeepSeek-V3", *(pytest.param(name, marks=NAMES) for name in ONE_LEVEL_UP)]
)
def target(request, tmp_path_factory):
    return published(tmp_path_factory.mktemp("mtp"), request.param)


@torch.no_grad()
def test_logits_are_those_of_transformers(target, monkeypatch):
    """Rows of three lengths in one batch, after one and after three generated tokens; a row alone in transformers. Of
    the second guess, too, which reads the first feature of the module's own."""
    monkeypatch.setattr(eagle_tree, "MIN_REACH", 0.0)
    heads = MultiTokenPrediction(target)
    heads.nodes, heads.beam = 63, 1
    heads.check(target)
    states = [target.model(torch.tensor([row[:-1]])).last_hidden_state[0] for row in ROWS]

    def alone(row, hidden):
        positions, cache = torch.arange(len(row))[None, 1:], MtpCache(config=heads.module.config)
        inputs = dict(attention_mask=torch.ones_like(positions), position_ids=positions, mtp_cache=cache)
        tokens = torch.tensor([row[1:]])
        return heads.module(input_ids=tokens, last_hidden_states=hidden[None], **inputs)[1][0, -1]

    reason = "float32 sums in another order"
    expected = torch.stack([alone(row, hidden) for row, hidden in zip(ROWS, states)])
    for generated in (1, 3):
        prompts = [row[: len(row) - generated] for row in ROWS]
        pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
        mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(pads, prompts)])
        batch = torch.tensor([[0] * n + prompt for n, prompt in zip(pads, prompts)])
        sequences = sequences_of(batch, mask, torch.tensor([row[-generated] for row in ROWS]))
        begins = [pad(hidden[: len(prompt)], (0, 0, n, 0)) for hidden, prompt, n in zip(states, prompts, pads)]
        heads.begin(sequences, torch.stack(begins))
        for back in range(generated - 1, 0, -1):
            heads.propose([2] * 3, 63)
            new = append(sequences, torch.tensor([[row[-back]] for row in ROWS]))
            heads.accept(new, torch.stack([hidden[-back] for hidden in states])[:, None])
        proposal = heads.propose([2] * 3, 63).chain()
        features = heads._root[0]
        assert_close(heads.logits(features)[:, -1], expected, 1e-5, 1e-4, reason)
        for b, row in enumerate(ROWS):
            second = alone(row + proposal.tokens[b, :1].tolist(), torch.cat([states[b], features[b, -1:]]))
            assert proposal.tokens[b].tolist() == [expected[b].argmax().item(), second.argmax().item()]
            likely = expected[b].softmax(-1).max() * torch.stack([torch.tensor(1.0), second.softmax(-1).max()])
            assert_close(proposal.confidence[b], likely, 1e-4, 1e-4, reason)


def test_greedy_output_is_that_of_plain_generation(target):
    batch = left_padded_batch((5, 11, 8, 3, 9, 4, 7, 6))
    with transformers_loop():
        plain = target.generate(**batch, max_new_tokens=20, do_sample=False)
    drafter = MultiTokenPrediction(target)
    options = dict(max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    ways = dict(assistant_model="mtp"), dict(use_mtp=True), dict(assistant_model=fixed(drafter))
    for rows, way in zip((1, 3, 8), ways):
        part = {key: value[8 - rows :] for key, value in batch.items()}
        output = target.generate(**part, **options, **way)
        assert output.sequences.tolist() == plain[8 - rows :].tolist()
    assert output.accepted_tokens.sum() > 0, "something is drafted and accepted"
    assert mtp.of(target) is mtp.of(target), "it is read once"
    ends = dict(max_new_tokens=20, do_sample=False, eos_token_id=plain[3, 15:18].tolist(), pad_token_id=0)
    with transformers_loop():
        expected = target.generate(**batch, **ends)
    output = target.generate(**batch, **ends, assistant_model=fixed(drafter))
    assert output.tolist() == expected.tolist(), "sequences leave the batch one by one"
    assert all(parameter.requires_grad for parameter in target.parameters()), "what is shared is as it was"
    assert not any(parameter.requires_grad for parameter in drafter.module.layers.parameters())


def test_no_dtype_changes(tmp_path):
    published(tmp_path, "DeepSeek-V3")
    target = enable_speculation(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    target.lm_head.float()  # what a user did, and what is shared
    heads = MultiTokenPrediction(target)
    before = {name: tensor.dtype for name, tensor in target.state_dict().items()}
    own = {name: tensor.dtype for name, tensor in heads.module.layers.state_dict().items()}
    heads.check(target)
    assert before == {name: tensor.dtype for name, tensor in target.state_dict().items()}
    assert own == {name: tensor.dtype for name, tensor in heads.module.layers.state_dict().items()}


def test_a_model_that_is_quantized_as_it_is_loaded(tmp_path):
    """Its module stays in floats, and the checkpoint that it is saved to holds none."""
    published(tmp_path / "floats", "DeepSeek-V3")
    config = WeightOnlyConfig(bits=8, group_size=16)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32, quantization_config=config)
    conversions = target._weight_conversions
    batch, options = left_padded_batch(), dict(max_new_tokens=12, do_sample=False)
    plain = target.generate(**batch, **options)
    enable_speculation(target)
    drafter = MultiTokenPrediction(target)
    assert type(drafter.module.layers[0].mtp_block.self_attn.o_proj) is torch.nn.Linear
    assert target._weight_conversions is conversions
    assert target.generate(**batch, **options, assistant_model=fixed(drafter)).tolist() == plain.tolist()
    target.save_pretrained(tmp_path / "codes")
    saved = enable_speculation(AutoModelForCausalLM.from_pretrained(tmp_path / "codes"))
    with pytest.raises(ValueError, match="is quantized; MTP modules are read from those in floats"):
        saved.generate(**batch, **options, assistant_model="mtp")


def test_the_files_are_those_that_the_model_was_loaded_from(tmp_path, monkeypatch):
    """Of a revision, a subfolder and a cache of its own, in a gated repository."""
    published(tmp_path / "repos" / "me" / "model@asked" / "inner", "GLM-4.5")
    with serving(tmp_path / "repos", monkeypatch) as hub:
        monkeypatch.delenv("HF_TOKEN")
        hub.token = "hf_mine"
        where = {"token": "hf_mine", "revision": "asked", "subfolder": "inner", "cache_dir": tmp_path / "cache"}
        target = AutoModelForCausalLM.from_pretrained("me/model", **where)
        MultiTokenPrediction(target)
        assert set(hub.authorizations) == {"Bearer hf_mine"}
        assert target.config.name_or_path == "me/model"
        monkeypatch.setattr(hub, "token", "hf_other")
        again = AutoModelForCausalLM.from_pretrained("me/model", local_files_only=True, **where)
        asked = len(hub.requests)
        MultiTokenPrediction(again)
        assert len(hub.requests) == asked
        (tmp_path / "cache").rename(tmp_path / "gone")
        with pytest.raises(ValueError, match="me/model does not appear to have a file named model.safetensors"):
            MultiTokenPrediction(again)


def test_sampled_output_has_the_distribution_of_the_target(tmp_path, monkeypatch):
    """6,000 texts of three tokens, the last two of them drafted in trees."""
    monkeypatch.setattr(mtp, "FIRST_TOKENS", 8)
    sizes = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=8, pad_token_id=None)
    target = published(tmp_path, "GLM-4.5", **{**sizes, "bos_token_id": None})
    target.generation_config.pad_token_id = 9
    drafter, probabilities, texts = MultiTokenPrediction(target), torch.ones(1), torch.tensor([[3, 4, 5]])
    drafter.nodes = 8
    torch.manual_seed(0)
    options = dict(do_sample=True, top_k=0, max_new_tokens=3, return_dict_in_generate=True)
    output = target.generate(texts.expand(6_000, -1), assistant_model=fixed(drafter), **options)
    codes = output.sequences[:, -3:] @ torch.tensor([64, 8, 1])
    for _ in range(3):
        with torch.no_grad():
            following = target(texts).logits[:, -1].softmax(-1)
        probabilities = (probabilities[:, None] * following).flatten()
        texts = torch.cat([texts.repeat_interleave(8, 0), torch.arange(8).repeat(len(texts))[:, None]], 1)
    assert output.accepted_tokens.sum() > 600
    assert p_value(torch.bincount(codes, minlength=8**3), probabilities) > RIGHT


def test_what_has_no_module_that_is_read_is_refused_by_name(tmp_path):
    ids = torch.tensor([[5, 6, 7]])

    def refused(model, message):
        with pytest.raises(ValueError, match=message):
            enable_speculation(model).generate(ids, max_new_tokens=2, assistant_model="mtp")

    refused(tiny_model("llama"), "LlamaForCausalLM has num_mtp_layers=None; .* such as DeepSeek-V3 and GLM-4.5")
    config = CONFIGS["GLM-4.5"](vocab_size=128)
    refused(AutoModelForCausalLM.from_config(config), "was not loaded from a checkpoint, where its MTP module would be")
    published(tmp_path, "GLM-4.5")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if ".eh_proj." not in k}, path, metadata={"format": "pt"})
    refused(AutoModelForCausalLM.from_pretrained(tmp_path), "holds no MTP module that can be read: .*eh_proj")
    config.num_mtp_layers = 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.config.num_mtp_layers = 2
    refused(model, "num_mtp_layers=2; models are taken whose config says 1")
