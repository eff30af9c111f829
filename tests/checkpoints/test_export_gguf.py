"""GGUF files: every weight by the gguf package's own dequantization, logits by transformers' reader and, where it is
installed, by llama.cpp."""

import json
from pathlib import Path

import gguf
import helpers
import numpy as np
import pytest
import torch
import unpackers
from exported import IDS, compressed, largest_difference, logits, weights
from helpers import assert_close, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import hf_efficient
from hf_efficient.integrations.transformers_releases import dequantized_gguf, has


HALF_ULP = 2**-11  # of float16, relative
HEADS = {"attn_q": 4, "attn_k": 2}
TEXTS = [
    "Hello world 12345  a\n\n\tb",
    "it's the river's 3 mills, isn't it?",
    "<s>The tide</s> goes out <tool> 7",
    "naïve café 東京 😀",
]


def read(file, **options):
    """The model that transformers makes of a GGUF file."""
    options = {**dequantized_gguf(), "dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **options).eval()


def llama_cpp_model(file, **options):
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is compiled for a machine, which CI does not do"
    )
    return llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1, **options)


def llama_cpp_logits(model, ids) -> torch.Tensor:
    rows = []
    for row in ids.tolist():
        model.reset()
        model.eval(row)
        rows.append(np.array(model.scores[: len(row)]))
    return torch.from_numpy(np.stack(rows))


def renamed(ours: dict) -> dict:
    """{name of a layer in transformers: weight} by the names in the file."""
    return dict(zip(unpackers.gguf_names(ours), ours.values()))


@pytest.mark.parametrize(
    ("config", "kind", "exact"),
    [
        (dict(bits=4, group_size=32, symmetric=True), "Q4_0", True),
        (dict(bits=4, group_size=64, symmetric=True), "Q4_0", True),
        (dict(bits=4, group_size=None, symmetric=True), "Q4_0", True),
        (dict(bits=4, group_size=32), "Q4_1", False),
        (dict(bits=8, group_size=-1, symmetric=True), "Q8_0", True),
        (dict(quant_method="efficient_w8a8"), "Q8_0", False),
    ],
)
def test_weights_are_the_same_numbers(tmp_path, config, kind, exact):
    model = compressed(tmp_path, model_dtype=torch.bfloat16, **config)
    report = hf_efficient.export(model, tmp_path / "out.gguf", "gguf")
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert {found[name] for name in renamed(weights(model))} == {kind}
    assert found["token_embd.weight"] == found["output.weight"] == "BF16" and found["output_norm.weight"] == "F32"
    stored = unpackers.gguf(tmp_path / "out.gguf", HEADS)
    ours = renamed(weights(model))
    difference = largest_difference(ours, {name: stored[name] for name in ours})
    # Q4_1 stores -zero_point * scale and W8A8 has scales in float32: both are rounded to float16
    assert difference == 0 if exact else 0 < difference <= 2 * HALF_ULP
    assert (report.rounding == 0) == exact
    assert torch.equal(stored["token_embd.weight"], model.get_input_embeddings().weight.float())


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {}),
        ("llama_tied", dict(attention_bias=True)),
        ("mistral", dict(sliding_window=None)),
        ("qwen3", dict(head_dim=128)),  # the head_dim that transformers takes of any Qwen 3 file
    ],
)
def test_transformers_reads_the_same_logits(tmp_path, arch, shape):
    model = compressed(tmp_path, arch, shape=shape, bits=4, group_size=32, symmetric=True)
    hf_efficient.export(model, tmp_path / "out.gguf", "gguf")
    reason = "scales in float32 were rounded to float16: 2^-12 of a weight on average, through two layers"
    assert_close(logits(read(tmp_path / "out.gguf")), logits(model), rms=1e-3, maximum=0.05, reason=reason)


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16, rope_theta=1e4)


@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {}),
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4))),
        ("llama", dict(rope_parameters=LLAMA3)),
        ("llama_tied", {}),
        ("mistral", {}),
        ("qwen3", {}),
        ("qwen2", {}),
    ],
)
def test_llama_cpp_computes_the_same_logits_of_a_dense_model(tmp_path, arch, shape, monkeypatch):
    monkeypatch.setitem(
        helpers.TINY_MODELS, "qwen2", ("Qwen2Config", dict(intermediate_size=96, num_key_value_heads=2))
    )
    model = tiny_model(arch, **shape)
    hf_efficient.export(model, tmp_path / "out.gguf", "gguf")
    file = llama_cpp_model(tmp_path / "out.gguf")
    ids = IDS[:, :8]  # within the window of mistral
    with torch.no_grad():
        ours = model(ids).logits
    reason = "float32 weights; llama.cpp keeps keys and values of the cache in float16"
    assert_close(llama_cpp_logits(file, ids), ours, rms=2e-3, maximum=0.05, reason=reason)


@pytest.mark.parametrize("config", [dict(bits=4, symmetric=True), dict(bits=4), dict(bits=8, symmetric=True)])
def test_llama_cpp_computes_with_the_codes(tmp_path, config):
    model = compressed(tmp_path, group_size=32, **config)
    hf_efficient.export(model, tmp_path / "out.gguf", "gguf")
    reason = "llama.cpp rounds the inputs of every product to 8 bits, a scale for 32"
    assert_close(llama_cpp_logits(llama_cpp_model(tmp_path / "out.gguf"), IDS), logits(model), 0.03, 0.5, reason)


def trained_tokenizer(kind: str, size: int = 400):
    """A small tokenizer of one of the kinds that llama.cpp has, trained on this file."""
    text = Path(__file__).read_text(encoding="utf-8")
    special = ["<unk>", "<s>", "</s>"]
    if kind == "llama":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=size + 256, special_tokens=special)
        tokenizer.train_from_iterator(text.split(), trainer)
        tokenizer = Tokenizer.from_str(_only_special(tokenizer.to_str(), special[:3]))
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, level]) if digits else level
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator([text], trainer)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _only_special(saved: str, special: list[str]) -> str:
    """The tokenizer with no added tokens but these: bytes are ordinary entries of the vocabulary."""
    saved = json.loads(saved)
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in special]
    return json.dumps(saved)


@pytest.mark.parametrize(
    ("kind", "model", "pre"), [("gpt-2", "gpt2", "gpt-2"), ("smollm", "gpt2", "smollm"), ("llama", "llama", "default")]
)
def test_tokenizers(tmp_path, kind, model, pre):
    tokenizer = trained_tokenizer(kind)
    vocab_size = len(tokenizer) + 7  # as embeddings are padded
    hf_efficient.export(tiny_model("llama", vocab_size=vocab_size), tmp_path / "out.gguf", "gguf", tokenizer)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "out.gguf").fields.items()}
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == (model, pre)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert kinds[-7:] == [gguf.TokenType.UNUSED] * 7 and kinds[1:3] == [gguf.TokenType.CONTROL] * 2
    assert kinds[tokens.index("<tool>")] == gguf.TokenType.USER_DEFINED
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert not fields["tokenizer.ggml.add_bos_token"] and not fields["tokenizer.ggml.add_eos_token"]
    if kind == "gpt-2":
        again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
        for text in TEXTS:
            if has("5.18") or "<tool>" not in text:  # older ones know no user-defined tokens
                assert again(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama"])
def test_llama_cpp_splits_text_in_the_same_way(tmp_path, kind):
    tokenizer = trained_tokenizer(kind)
    hf_efficient.export(tiny_model("llama", vocab_size=len(tokenizer)), tmp_path / "out.gguf", "gguf", tokenizer)
    file = llama_cpp_model(tmp_path / "out.gguf")
    for text in TEXTS:
        assert file.tokenize(text.encode(), add_bos=False, special=True) == tokenizer(text)["input_ids"], text


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="type WordLevel has no place in a gguf file.*without one"):
        hf_efficient.export(model, tmp_path / "out.gguf", "gguf", tiny_tokenizer())
    tokenizer = trained_tokenizer("gpt-2")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tiny_model("llama", vocab_size=512)
    with pytest.raises(ValueError, match="no name for how this tokenizer splits text.*Whitespace"):
        hf_efficient.export(model, tmp_path / "out.gguf", "gguf", tokenizer)
    with pytest.raises(ValueError, match="the model a vocabulary of 128: it is another model's"):
        hf_efficient.export(tiny_model("llama"), tmp_path / "out.gguf", "gguf", trained_tokenizer("gpt-2"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arch", "shape", "config", "message"),
    [
        ("llama", {}, dict(bits=3, group_size=32), "weights of 3 bits; gguf has regular grids of 4 and 8"),
        ("llama", {}, dict(bits=2, group_size=32), "weights of 2 bits"),
        ("llama", {}, dict(bits=8, group_size=32), "8 bits with zero points; Q8_0 has none"),
        ("llama", {}, dict(bits=4, group_size=16), "groups of 16 weights; gguf has one scale for 32"),
        ("llama", dict(intermediate_size=100), dict(bits=4, group_size=32), "down_proj: rows of 100 weights"),
        ("llama", {}, dict(quant_method="efficient_w8a8", dtype="fp8"), "Float8Format, for which gguf has no type"),
        ("llama", {}, dict(bits=4, group_size=32, codebook="nf4"), "codebook='nf4'"),
        ("llama", dict(hidden_act="gelu"), dict(bits=4, group_size=32), "hidden_act='gelu' of the model"),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
            dict(bits=4),
            "rope_type='dynamic'",
        ),
        ("gpt2", {}, dict(bits=4, group_size=32), r"model_type='gpt2'\) cannot be written as gguf"),
    ],
)
def test_what_gguf_cannot_hold_is_named(tmp_path, arch, shape, config, message):
    model = compressed(tmp_path, arch, shape=shape, **config)
    with pytest.raises(ValueError, match=message):
        hf_efficient.export(model, tmp_path / "out.gguf", "gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_context_of_a_sliding_window_ends_where_llama_cpp_would_differ(tmp_path):
    hf_efficient.export(tiny_model("mistral"), tmp_path / "out.gguf", "gguf")
    assert gguf.GGUFReader(tmp_path / "out.gguf").get_field("llama.context_length").contents() == 8
