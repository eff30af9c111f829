"""What transformers keeps in float32 is neither compressed nor rounded."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.integrations import transformers_compat
from hf_efficient.layers import CompressedModule
from hf_efficient.planning import meta_model


SIZES = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = dict(SIZES, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, max_position_embeddings=64)
T5 = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
# config -> (arguments, ends of the names of weights that are in float32 in bfloat16, and in float16)
MODELS = {
    "HunYuanMoEV1Config": (dict(HEADS, num_experts=4, moe_topk=2, head_dim=16), ["gate.wg.weight"], ["gate.wg.weight"]),
    "T5Config": (T5, [], ["wo.weight"]),
    "Ernie4_5_MoeConfig": (
        dict(HEADS, moe_num_experts=4, moe_k=2, moe_intermediate_size=48, moe_layer_start_index=0),
        ["gate.weight"],
        ["gate.weight"],
    ),
    "GptOssConfig": (
        dict(HEADS, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        [],
        ["input_layernorm.weight"],
    ),
}


def auto(config):
    return AutoModelForSeq2SeqLM if "T5" in config else AutoModelForCausalLM


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """(folder of a random model in float32, its row in MODELS, the class that loads it)"""
    torch.manual_seed(0)
    cls, path = auto(request.param), tmp_path_factory.mktemp(request.param)
    cls.from_config(getattr(transformers, request.param)(**MODELS[request.param][0])).save_pretrained(path)
    return path, MODELS[request.param], cls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [WeightOnlyConfig(bits=4, group_size=32), W8A8Config()], ids=["int4", "w8a8"])
def test_what_is_kept_has_the_bits_that_transformers_gives_it(dtype, config, case, tmp_path):
    path, (_, in_bfloat16, in_float16), cls = case
    plain = dict(cls.from_pretrained(path, dtype=dtype).named_parameters())
    model = cls.from_pretrained(path, dtype=dtype, quantization_config=config)
    model.save_pretrained(tmp_path / "q")
    again = cls.from_pretrained(tmp_path / "q", dtype=dtype)
    expected = in_bfloat16 if dtype is torch.bfloat16 else in_float16
    kept = {name for name, parameter in plain.items() if parameter.dtype != dtype}
    assert all(any(name.endswith(end) for name in kept) for end in expected) and (kept or not expected)
    for loaded in (model, again):
        modules = dict(loaded.named_modules())
        assert any(isinstance(module, CompressedModule) for module in modules.values())
        compressed = {name for name, module in modules.items() if isinstance(module, CompressedModule)}
        found = {n: p for n, p in loaded.named_parameters() if n.rpartition(".")[0] not in compressed}
        assert kept <= found.keys()
        assert all(found[n].dtype == plain[n].dtype and torch.equal(found[n], plain[n]) for n in found)
    again.dequantize()
    assert {name: p.dtype for name, p in again.named_parameters()} == {name: p.dtype for name, p in plain.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_without_weights_have_the_same_dtypes(dtype, case):
    path, _, cls = case
    plain = {name: p.dtype for name, p in cls.from_pretrained(path, dtype=dtype).named_parameters()}
    built = meta_model.build(transformers.AutoConfig.from_pretrained(path), dtype)
    assert {name: p.dtype for name, p in built.named_parameters()} == plain


def test_patterns_are_read_as_transformers_reads_them(case):
    path, _, cls = case
    for dtype in (torch.bfloat16, torch.float16):
        model = cls.from_pretrained(path, dtype=dtype)
        with torch.device("meta"):
            declared = type(model)._from_config(model.config, dtype=dtype)
        kept = transformers_compat.kept_parameters(declared)
        for name, parameter in declared.named_parameters():
            loaded = model.get_parameter(name).dtype
            assert transformers_compat.loaded_dtype(declared, name, parameter.dtype) == loaded, name
            assert loaded == dtype or name in kept, name


def test_a_tower_in_another_dtype_is_not_kept():
    tower = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
    config = transformers.CLIPConfig(text_config=dict(tower, vocab_size=128), vision_config=tower, projection_dim=32)
    with torch.device("meta"):
        model = transformers.CLIPModel(config)
        model.text_model.bfloat16()
    assert transformers_compat.kept_parameters(model) == set()
