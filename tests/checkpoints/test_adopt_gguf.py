"""GGUF files that stay quantized, against gguf's own dequantization and transformers' loading."""

import gguf
import numpy as np
import pytest
import torch
from helpers import assert_close, needs_transformers, tiny_model
from saved_models import logits
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from unpackers import GGUF_NAMES

import hf_efficient
from hf_efficient.checkpoints import adopt
from hf_efficient.checkpoints.adopt.gguf_blocks import KINDS, unpack
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.integrations import transformers_releases as releases
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.layers import EfficientLinear


HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


pytestmark = pytest.mark.usefixtures("none_adopted")


def random_blocks(kind: str, rows: int, columns: int, size: float = 1.0) -> np.ndarray:
    """Random bytes of [rows, columns] weights of a type, with finite float16 where it has them."""
    generator = np.random.default_rng(0)
    width, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = generator.integers(0, 256, (rows, columns // width, nbytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        values = (generator.random((rows, columns // width, 1)) * size).astype(np.float16)
        data[..., at : at + 2] = values.view(np.uint8)
    return data.reshape(rows, -1)


needs_gguf = needs_transformers("5.17", "a GGUF file that stays quantized")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_gguf_makes_of_them(kind):
    data = random_blocks(kind, 3, 512)
    if KINDS[kind].minimum:
        data[0, HALVES[kind][0] : HALVES[kind][0] + 2] = 0  # a scale of 0 beside a minimum
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    codes, scale, minimum = unpack(kind, torch.from_numpy(data).view(3, -1, nbytes))
    format = WeightOnlyConfig(**KINDS[kind].scheme(torch.bfloat16)).format()
    tensors = {"qweight": pack_codes(codes, format.bits), "scale": scale, "minimum": minimum}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == format.shapes(3, 512)
    assert torch.equal(format.dequantize(tensors, 512, torch.float32), expected)
    assert format.bits_per_weight(64, 512, torch.bfloat16) == KINDS[kind].ours
    assert data.nbytes * 8 / (3 * 512) == KINDS[kind].theirs


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **GGUF_NAMES,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# the rest is Q4_K
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "attn_q": "Q5_K", "token_embd": "Q8_0"}


def write(path, kinds=MIXED, other="Q4_K", without="", more=(), **overrides):
    sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    model = tiny_model("llama", **sizes)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(128)
    for name, tensor in model.state_dict().items():
        ours = name.removesuffix(".weight")
        leaf = NAMES[ours.removeprefix("model.layers.0.")] if "layers" in ours else NAMES[ours]
        theirs = f"blk.0.{leaf}.weight" if "layers" in ours else f"{leaf}.weight"
        if theirs == without:
            continue
        if tensor.dim() == 1:
            writer.add_tensor(theirs, tensor.numpy())
            continue
        kind = kinds.get(leaf, other)
        data = random_blocks(kind, *tensor.shape, size=2e-4 if kind in ("Q6_K", "Q4_K", "Q5_K") else 1e-2)
        raw_dtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(theirs, overrides.get(leaf, data), raw_dtype=raw_dtype)
    for theirs, values in more:
        writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", **options)


@needs_gguf
def test_model_of_k_quants(tmp_path):
    write(tmp_path / "tiny.gguf")
    theirs = load(tmp_path)
    assert not any(isinstance(module, EfficientLinear) for module in theirs.modules())
    hf_efficient.adopt("gguf")
    model = load(tmp_path)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, EfficientLinear)}
    assert len(layers) == 8 and "lm_head" in layers
    for name, layer in layers.items():
        assert torch.equal(layer.dequantized(dtype=torch.float32), theirs.get_submodule(name).weight), name
    assert torch.equal(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
    assert_close(logits(model), logits(theirs), 1e-5, 1e-4, "float32 sums in another order")
    ids = torch.tensor([[1, 5, 9]])
    tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, theirs.generate(ids, max_new_tokens=3, do_sample=False))
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(model.dequantize().lm_head.weight, theirs.lm_head.weight)


@needs_gguf
def test_loading_gives_no_warning_of_arrays_that_are_read_only(tmp_path, recwarn):
    write(tmp_path / "tiny.gguf")
    hf_efficient.adopt("gguf")
    torch.set_warn_always(True)
    try:
        load(tmp_path)
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in recwarn if "not writable" in str(warning.message)]


@needs_gguf
def test_types_without_a_format_are_dequantized(tmp_path, caplog):
    write(tmp_path / "tiny.gguf", {"ffn_down": "IQ4_NL"}, "Q8_0")
    theirs = load(tmp_path)
    hf_efficient.adopt("gguf")
    model = load(tmp_path)
    down = model.model.layers[0].mlp.down_proj
    assert type(down) is torch.nn.Linear
    assert torch.equal(down.weight, theirs.model.layers[0].mlp.down_proj.weight)
    assert "IQ4_NL" in caplog.text
    assert_close(logits(model), logits(theirs), 1e-5, 1e-4, "float32 sums in another order")


@needs_gguf
def test_damaged_files_are_refused(tmp_path):
    hf_efficient.adopt("gguf")
    write(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    # of gguf's reader, from which transformers reads the config
    with pytest.raises(ValueError, match="cannot reshape array"):
        load(tmp_path)
    nan = random_blocks("Q4_K", 256, 256).reshape(256, -1, 144).copy()
    nan[3, 0, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    write(tmp_path / "tiny.gguf", ffn_gate=nan.reshape(256, -1))
    with pytest.raises(ValueError, match=r"blk.0.ffn_gate.weight \(Q4_K\) holds NaN"):
        load(tmp_path)


@needs_gguf
def test_files_that_lack_or_add_tensors_are_refused(tmp_path):
    hf_efficient.adopt("gguf")
    for theirs, ours in (("blk.0.ffn_up.weight", "layers.0.mlp.up_proj.weight"), ("output_norm.weight", "norm.weight")):
        write(tmp_path / "tiny.gguf", without=theirs)
        with pytest.raises(ValueError, match=rf"holds nothing for 1 parameters of LlamaForCausalLM.*model\.{ours}"):
            load(tmp_path)
    write(tmp_path / "tiny.gguf", more=[("blk.0.attn_q.bias", np.ones(256, np.float32))])
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias is not read: .*q_proj\.weight .* has no bias"):
        load(tmp_path)
    write(tmp_path / "tiny.gguf", more=[("blk.0.attn_q.bias", np.zeros(256, np.float32))])
    heads = AutoModelForSequenceClassification.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert isinstance(heads.model.layers[0].self_attn.q_proj, EfficientLinear)


@pytest.mark.parametrize("is_old", [True, False])
def test_a_release_that_dequantizes_every_file_is_named_once(is_old, monkeypatch, caplog):
    if is_old:
        monkeypatch.setattr(releases, "version", lambda: "5.16.1")
        monkeypatch.setattr(adopt, "has", releases.has.__wrapped__)
        monkeypatch.setattr(releases, "has", releases.has.__wrapped__)  # without what it remembers
    hf_efficient.adopt()
    hf_efficient.adopt()
    assert caplog.text.count("keeping them quantized needs transformers 5.17") == (not releases.has("5.17"))
    if is_old:
        with pytest.raises(ValueError, match=r"adopt\('gguf'\) needs transformers 5.17 or later; installed is 5.16.1"):
            hf_efficient.adopt("gguf")
