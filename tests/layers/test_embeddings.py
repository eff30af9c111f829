"""Compressed input embeddings: `WeightOnlyConfig(embeddings=True)`."""

import copy
import pickle
import shutil

import pytest
import torch
from helpers import TINY_MODELS, assert_close, tiny_config
from safetensors.torch import load_file, save_file
from saved_models import INT4, folder, load, logits
from torch import nn
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import hf_efficient
from hf_efficient import WeightOnlyConfig
from hf_efficient.embeddings import EfficientEmbedding, TiedEmbedding, TiedLinear
from hf_efficient.evaluation import memory


EMBEDDED = dict(INT4, embeddings=True)
FOUR_BITS = {"*embed_tokens": {"bits": 4}, "*wte": {"bits": 4}}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = dict(vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TIED = [name for name in TINY_MODELS if tiny_config(name).tie_word_embeddings]


def generated(model):
    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0)


def four_bits(name: str) -> dict:
    pattern = "*wte" if name == "gpt2" else "*embed_tokens"
    return {"overrides": {pattern: FOUR_BITS[pattern]}}


EIGHT, FOUR = (8, torch.float32), (4, torch.bfloat16)


@pytest.mark.parametrize(
    "name, bits, dtype",
    [
        *((name, *(EIGHT, FOUR)[i % 2]) for i, name in enumerate(TINY_MODELS)),
        *(("llama", *FOUR), ("llama_tied", *EIGHT), ("gpt2", *FOUR)),
    ],
)
def test_load_generate_save_reload_dequantize(name, dtype, bits, tmp_path):
    model = load(folder(name, dtype), dtype, **EMBEDDED, **(four_bits(name) if bits == 4 else {}))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, EfficientEmbedding) and embedding.format.bits == bits
    assert (type(head) is TiedLinear) == (name in TIED)
    before, tokens = logits(model), generated(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype)
    assert torch.equal(logits(again), before) and torch.equal(generated(again), tokens)
    again.save_pretrained(tmp_path / "second")
    first, second = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)

    base = load(tmp_path, dtype, kind=AutoModel)  # the checkpoint's model without its head
    assert torch.equal(logits(base), logits(model.base_model))

    on_load, ids = load(tmp_path, dtype, dequantize=True), torch.arange(128)
    rows = embedding(ids)
    model.dequantize()
    dense = model.get_input_embeddings()
    assert type(dense) is embedding.original and torch.equal(dense(ids), rows), "rows are those of the dense weight"
    assert (model.get_output_embeddings().weight is dense.weight) == (name in TIED)
    assert torch.equal(logits(on_load), logits(model))
    if dtype is torch.float32:
        assert_close(logits(model), before, 2e-5, 1e-3, "the same weights through other operators")
        assert torch.equal(generated(model), tokens)


@pytest.mark.parametrize("tier_name", ["best", "avx2", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_dequantized_weight_on_every_tier(dtype, tier_name, monkeypatch):
    if tier_name != "best":
        monkeypatch.setenv("HF_EFFICIENT_CPU", tier_name)
    for name, bits in (("llama", 4), ("llama_tied", 8)):
        embedding = load(folder(name), dtype, **EMBEDDED, **(four_bits(name) if bits == 4 else {})).model.embed_tokens
        dense, ids = embedding.dequantized(), torch.randint(128, (3, 50))
        assert torch.equal(embedding(ids), dense[ids]) and torch.equal(embedding(ids[0].int()), dense[ids[0]])
        assert embedding(ids[:0]).shape == (0, 50, 64)
        for wrong in (128, -1):
            with pytest.raises(IndexError, match="index out of range in self"):
                embedding(torch.tensor([[3, wrong]]))


def test_one_set_of_codes_serves_both(tmp_path):
    plain, model = load(folder("llama_tied"), **INT4), load(folder("llama_tied"), **EMBEDDED)
    embedding, weights = model.model.embed_tokens, 128 * 64
    held = weights + 4 * 128 + 4 * 3  # codes, scales, the placeholder
    assert memory.weight_bytes(plain) - memory.weight_bytes(model) == 4 * weights - held
    assert "qweight" not in embedding._parameters and not [*model.lm_head.buffers()]
    model.save_pretrained(tmp_path)
    held = [name for name in load_file(tmp_path / "model.safetensors") if "embed" in name or "head" in name]
    assert sorted(held) == [f"model.embed_tokens.{part}" for part in ("qweight", "scale", "weight")]


def test_a_head_of_its_own(tmp_path):
    model = load(folder("llama_tied"), **EMBEDDED, quantize_lm_head=True)
    assert model.lm_head.format.bits == 4 and model.model.embed_tokens.format.bits == 8
    assert not model.model.embed_tokens.is_multiplied and not model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_the_saved_config_names_what_was_chosen(tmp_path):
    model = load(folder("llama_tied"), bits=3, embeddings=True, group_size=32, method="hqq")
    model.save_pretrained(tmp_path)
    own = dict(load(tmp_path).config.quantization_config.overrides)["model.embed_tokens"]
    assert (own["bits"], own["group_size"], own["symmetric"], own["method"]) == (8, -1, True, "rtn")
    again = load(tmp_path, bits=3, embeddings=True, group_size=32, method="hqq")  # what it was made with
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match="compressed already"):
        load(tmp_path, bits=3, group_size=32, method="hqq")
    with pytest.raises(ValueError, match="compressed already"):
        load(tmp_path, bits=3, embeddings=True, group_size=32, method="hqq", **four_bits("llama"))


@pytest.mark.parametrize("fields", [{"bits": 4}, {"bits": 4, "method": "mse"}, {"bits": 4, "method": "hqq"}])
def test_four_bits_come_in_groups_of_64_with_zero_points(fields):
    format = load(folder("llama"), **EMBEDDED, overrides={"*embed_tokens": fields}).model.embed_tokens.format
    assert (format.bits, format.group_size, format.symmetric, format.zero_point) == (4, 64, False, "integer")


def test_what_is_chosen_does_not_follow_from_the_other_weights():
    for config in (dict(bits=2), dict(bits=4, codebook="nf4"), dict(bits=4, rotate=True), dict(int8_on_cpu=True)):
        model = load(folder("llama"), method="rtn", embeddings=True, **config)
        format = model.model.embed_tokens.format
        assert (format.bits, format.group_size, format.symmetric, format.int8_on_cpu) == (8, -1, True, "auto")


def test_calibration_leaves_it_as_it_is():
    tokens = torch.randint(3, 128, (4, 32))
    calibration = dict(tokens=tokens, num_samples=4, sequence_length=32)
    model = load(folder("llama_tied"), bits=4, group_size=32, method="awq", embeddings=True, calibration=calibration)
    plain = load(folder("llama_tied"), **EMBEDDED)
    assert torch.equal(model.model.embed_tokens.dequantized(), plain.model.embed_tokens.dequantized())


REFUSED = [
    ({"bits": 3}, "bits=3 is not supported: it must be one of \\(4, 8\\)"),
    ({"bits": 4, "codebook": "nf4"}, "codebook='nf4'"),
    ({"group_size": None}, "group_size=None"),
    ({"method": "gptq"}, "method='gptq'.*needs no data"),
    ({"rotate": True}, "rotate=True"),
    ({"bits": 4, "method": "hqq", "zero_point": "float"}, "zero_point='float'"),
    (None, "embeddings=True, but .* leave the input embedding model.embed_tokens as it is"),
]


@pytest.mark.parametrize("fields, message", REFUSED)
def test_schemes_that_an_embedding_does_not_have(fields, message):
    with pytest.raises(ValueError, match=message):
        load(folder("llama"), **EMBEDDED, overrides={"*embed_tokens": fields})


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="embeddings=True, but modules_to_not_convert"):
        load(folder("llama"), **EMBEDDED, modules_to_not_convert=["embed_tokens"])
    with pytest.raises(ValueError, match="embeddings='yes' is not supported: it must be True or False"):
        WeightOnlyConfig(embeddings="yes")
    with pytest.raises(ValueError, match="has no argument 'embeddings'"):
        hf_efficient.W8A8Config(embeddings=True)
    with pytest.raises(ValueError, match="'\\*embed_tokens' changes nothing"):
        load(folder("llama"), **INT4, **four_bits("llama"))


def reload(model, path):
    model.eval().save_pretrained(path)
    return type(model).from_pretrained(path, quantization_config=WeightOnlyConfig(**EMBEDDED))


SEQ2SEQ = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0, **TINY)
    ),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            **TINY,
            **{f"{part}_{size}": value for part in ("encoder", "decoder") for size, value in
               (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))},
            d_model=64,
            scale_embedding=True,
            decoder_start_token_id=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoders_and_decoders_share_one(name, tmp_path):
    model = reload(SEQ2SEQ[name](), tmp_path / "dense")
    modules = dict(model.named_modules())
    assert sum(isinstance(module, EfficientEmbedding) for module in modules.values()) == 1
    assert sum(isinstance(module, TiedEmbedding) for module in modules.values()) == 2
    ids = torch.tensor([[5, 6, 7, 9]])

    def computed(model):
        with torch.no_grad():
            return model(input_ids=ids, decoder_input_ids=ids).logits

    before = computed(model)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(computed(type(model).from_pretrained(tmp_path / "saved")), before)
    assert torch.equal(computed(copy.deepcopy(model)), before)
    assert torch.equal(computed(pickle.loads(pickle.dumps(model))), before)
    model.dequantize()
    shared = {id(model.get_submodule(name).weight) for name, old in modules.items() if hasattr(old, "source")}
    assert shared == {id(model.get_input_embeddings().weight)}
    assert_close(computed(model), before, 5e-5, 1e-3, "the same weights through other operators")


class Reading(GPT2LMHeadModel):
    """Reads the weight of its embedding beside the embedding's own forward."""

    def forward(self, input_ids, **options):
        return super().forward(inputs_embeds=self.transformer.wte.weight[input_ids], **options)


class Doubling(nn.Embedding):
    def forward(self, ids):
        return 2 * nn.functional.embedding(ids, self.weight)


class WithDoubling(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Doubling(config.vocab_size, config.hidden_size, config.pad_token_id)


class WithNorm(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.max_norm = 1.0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Reading(tiny_config("gpt2")), "its forward reads the weight of transformer.wte itself"),
        (lambda: WithDoubling(tiny_config("llama")), "model.embed_tokens is a Doubling, which does more than scale"),
        (lambda: WithNorm(tiny_config("llama")), "model.embed_tokens has max_norm=1.0"),
        (
            lambda: BertForMaskedLM(
                BertConfig(
                    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, vocab_size=128
                )
            ),
            "cls.predictions.decoder has a bias",
        ),
        (
            lambda: ViTForImageClassification(
                ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8)
            ),
            "is a ViTPatchEmbeddings, no nn.Embedding",
        ),
    ],
)
def test_models_whose_embedding_cannot_be_compressed(make, message, tmp_path):
    with pytest.raises(ValueError, match=f"embeddings=True is not supported for .*: .*{message}"):
        reload(make(), tmp_path)


def test_checkpoints_that_hold_both_tied_weights(tmp_path):
    shutil.copytree(folder("llama_tied"), tmp_path, dirs_exist_ok=True)
    expected = logits(load(folder("llama_tied"), **EMBEDDED))

    def with_head(head, **others):
        tensors = load_file(folder("llama_tied") / "model.safetensors")
        tensors = {k: v for k, v in tensors.items() if k != "model.embed_tokens.weight"} | others
        save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
        return load(tmp_path, **EMBEDDED)

    weight = load_file(folder("llama_tied") / "model.safetensors")["model.embed_tokens.weight"]
    name = "model.embed_tokens.weight"
    assert torch.equal(logits(with_head(weight.clone(), **{name: weight})), expected)
    assert torch.equal(logits(with_head(weight)), expected), "only that of the output embedding"
    with pytest.raises(ValueError, match="holds lm_head.weight with other numbers than model.embed_tokens.weight"):
        with_head(2 * weight, **{name: weight})


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("quantized", [True, False])
def test_disk(name, quantized, tmp_path):
    model = load(folder(name), **EMBEDDED)
    model.save_pretrained(tmp_path / "saved")
    places = dict.fromkeys(("model.embed_tokens", "lm_head"), "disk")
    places |= dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    options = dict(device_map=places, offload_folder=tmp_path / "offloaded")
    source, config = (tmp_path / "saved", {}) if quantized else (folder(name), EMBEDDED)
    away = load(source, options=options, **config)
    assert away.model.embed_tokens.qweight.is_meta and away.model.embed_tokens.is_offloaded
    assert_close(logits(away), logits(model), 2e-5, 1e-3, "offloaded weights are dequantized, then multiplied")
    assert away.model.embed_tokens.qweight.is_meta, "and are away again"
    with pytest.raises(ValueError, match="needs every weight in memory"):
        away.dequantize()
    away.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_resizing_is_refused():
    model = load(folder("llama_tied"), **EMBEDDED)
    assert model.resize_token_embeddings() is model.model.embed_tokens
    with pytest.raises(ValueError, match="resize_token_embeddings\\(140\\): the input embedding is compressed"):
        model.resize_token_embeddings(140)
    model.dequantize()
    assert model.resize_token_embeddings(140).weight.shape == (140, 64)


def test_tying_again_and_moving_change_nothing():
    model = load(folder("llama_tied"), **EMBEDDED)
    before = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), before) and model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(copy.deepcopy(model)), before)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), before)
    state = model.state_dict()
    model.load_state_dict(state)
    assert torch.equal(logits(model), before)


def test_gradients_pass_a_tied_head():
    model = load(folder("llama_tied"), **EMBEDDED)
    x = torch.randn(2, 64, requires_grad=True)
    model.lm_head(x).sum().backward()
    dense = model.model.embed_tokens.dequantized()
    assert_close(x.grad, dense.sum(0).expand(2, -1), 1e-5, 1e-3, "float32 sums")
    assert not any(p.requires_grad for p in model.model.embed_tokens.parameters())


def test_draft_heads_read_it():
    model = load(folder("llama_tied"), **EMBEDDED)
    heads = hf_efficient.MedusaHeads.for_model(model, draft_tokens=64)
    heads.check(model)
    assert torch.equal(heads.embed(torch.tensor([3])), model.model.embed_tokens(torch.tensor([3])))
