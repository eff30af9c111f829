"""`attn_implementation="flash_paged"` in transformers: every way to ask for it, and the traps on the way."""

import functools
import sys

import pytest
import torch
import transformers
from helpers import assert_close, left_padded_batch, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_flash_attention_utils as flash_utils

from hf_efficient import PagedCache
from hf_efficient.integrations import transformers_attention
from hf_efficient.kernels.attention import api


FLOAT32 = dict(rms=1e-5, maximum=1e-4, reason="float32 sums in another order")


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 has no nn.Linear, where transformers looks for a dtype
def test_the_dtype_is_kept(name, dtype, monkeypatch):
    seen = set()
    original = api.flash_attn_func
    spy = functools.wraps(original)(lambda *args, **kwargs: seen.add(args[0].dtype) or original(*args, **kwargs))
    monkeypatch.setattr(api, "flash_attn_func", spy)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    model = tiny_model(name, dtype=dtype)
    model.config._is_quantized = True  # transformers would cast to config.dtype
    model.config.dtype = torch.bfloat16
    ids = torch.randint(3, 128, (2, 6))
    expected = logits(model, "eager", input_ids=ids)
    actual = logits(model, "flash_paged", input_ids=ids)
    flash_utils._loaded_implementation = None
    assert seen == {dtype}
    tolerance = FLOAT32 if dtype == torch.float32 else dict(rms=0.05, maximum=4.0, reason="bf16 in two layers")
    assert_close(actual, expected, **tolerance)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_model("llama", attn_implementation="flash_paged")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", api.ATTENTION_NAMES)
def test_every_way_to_ask_for_it(saved, name):
    inputs = left_padded_batch()
    expected = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").generate(
        **inputs, max_new_tokens=8, do_sample=False
    )
    loaded = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), attn_implementation=name)
    built.load_state_dict(loaded.state_dict())
    switched = AutoModelForCausalLM.from_pretrained(saved)
    assert switched.config._attn_implementation == "sdpa"  # the name is not saved (trap A6)
    switched.set_attn_implementation(name)
    for model in (loaded, built, switched):
        assert model.config._attn_implementation == name
        cache = PagedCache(model.config)
        assert cache.reads_pages
        for kwargs in ({}, {"past_key_values": cache}):
            assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False, **kwargs), expected)


def test_pipeline(saved):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    texts = {}
    for name in ("eager", "flash_paged"):
        pipe = transformers.pipeline(
            "text-generation", str(saved), tokenizer=tokenizer, model_kwargs={"attn_implementation": name}
        )
        assert pipe.model.config._attn_implementation == name
        texts[name] = pipe(["w5 w6 w7 w8", "w9"], max_new_tokens=8, do_sample=False, batch_size=2)
    assert texts["eager"] == texts["flash_paged"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_on_the_accelerator(name):
    """The Triton kernels behind the same names: prefill of a left-padded batch and ten decode steps, read from pages
    and without a paged cache."""
    model = tiny_model(name, dtype=torch.bfloat16).cuda()
    batch = {key: tensor.cuda() for key, tensor in left_padded_batch((5, 40, 8)).items()}
    tokens = batch["attention_mask"].bool()
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    expected = logits(model, "eager", **batch)[tokens]
    new = torch.randint(3, 128, (3, 10), device="cuda")
    for make in (lambda: PagedCache(model.config), lambda: transformers.DynamicCache(config=model.config)):
        cache, mask = make(), batch["attention_mask"]
        bf16 = dict(rms=0.03, maximum=2.0, reason="bfloat16 through two layers")
        assert_close(logits(model, "flash_paged", **batch, past_key_values=cache)[tokens], expected, **bf16)
        for step in range(10):
            mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
            positions = mask.cumsum(1)[:, -1:] - 1
            last = logits(
                model, "flash_paged", input_ids=new[:, step : step + 1], attention_mask=mask, position_ids=positions,
                past_key_values=cache,
            )  # fmt: skip
        everything = torch.cat([batch["input_ids"], new], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        full = logits(model, "eager", input_ids=everything, attention_mask=mask, position_ids=positions)
        assert_close(last[:, -1], full[:, -1], **bf16)


def test_serve_takes_the_alias():
    """Trap A4: `transformers serve` only takes its own names and those that look like a kernel of the Hub."""
    from transformers.modeling_utils import is_kernel

    assert [is_kernel(name) for name in api.ATTENTION_NAMES] == [False, True]


def test_models_that_redirect_flash_attention():
    """Trap A3: gpt-oss sends every other flash name to a kernel of the Hub; a model that needs its own is refused."""
    model = tiny_model("gpt_oss")
    for name in api.ATTENTION_NAMES:
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name

    class Sparse(type(model)):
        _compatible_flash_implementations = ["MiniMaxAI/msa"]

    with pytest.raises(ValueError, match=r"Sparse needs a kernel of its own \(\['MiniMaxAI/msa'\]\)"):
        Sparse._from_config(model.config, attn_implementation="flash_paged")


def test_masks_that_flash_attention_drops_are_refused():
    """Trap A10: transformers leaves out what a 2-D mask cannot say."""
    from transformers import masking_utils

    model = tiny_model("llama", attn_implementation="flash_paged")
    arguments = dict(
        config=model.config,
        inputs_embeds=torch.zeros(1, 6, 64),
        attention_mask=torch.ones(1, 6),
        past_key_values=None,
        position_ids=torch.arange(6)[None],
    )
    assert masking_utils.create_causal_mask(**arguments) is None
    for extra in (
        dict(or_mask_function=lambda batch, head, q, kv: kv < 3),
        dict(and_mask_function=lambda batch, head, q, kv: kv > 0),
        dict(block_sequence_ids=torch.tensor([[0, 0, 0, -1, -1, -1]])),
    ):
        with pytest.raises(ValueError, match='flash_paged cannot express.*"sdpa"'):
            masking_utils.create_causal_mask(**arguments, **extra)


@torch.no_grad()
def test_packed_sequences_are_looked_for_once_a_forward(monkeypatch):
    """On an accelerator each look waits for the device."""
    is_true, looks = torch.Tensor.__bool__, []

    def noted(tensor):
        looks.append(sys._getframe(1).f_code.co_name)
        return is_true(tensor)

    model = tiny_model("llama", num_hidden_layers=3)
    model.set_attn_implementation("flash_paged")
    monkeypatch.setattr(torch.Tensor, "__bool__", noted)
    cache = PagedCache(model.config)
    for start in (0, 5):
        looks.clear()
        positions = torch.arange(start, start + 5)[None]
        model(torch.arange(3, 8)[None], position_ids=positions, past_key_values=cache)
        assert looks.count("_refuse_packed") == 1
    with pytest.raises(ValueError, match="position_ids restart"):
        model(torch.arange(3, 8)[None], position_ids=torch.tensor([[0, 1, 0, 1, 2]]), past_key_values=cache)


def test_padding_is_masked():
    """Trap A1: an attention without a registered mask would see the padding."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert set(api.ATTENTION_NAMES) <= set(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
    model, batch = tiny_model("llama"), left_padded_batch((3, 9))
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 77)}
    tokens = batch["attention_mask"].bool()
    assert torch.equal(logits(model, "flash_paged", **batch)[tokens], logits(model, "flash_paged", **other)[tokens])


def test_registering_twice_and_other_names():
    before = flash_utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation
    transformers_attention.register()
    after = flash_utils._lazy_imports, transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert before == after
    called = []

    def original(implementation, *args, **kwargs):
        called.append((implementation, args, kwargs))

    wrapped = transformers_attention._answer_for_our_names(original, flash_utils)
    wrapped("flash_attention_2", None, allow_all_kernels=True)
    assert called == [("flash_attention_2", (None,), {"allow_all_kernels": True})]
    assert wrapped("flash_paged")[0] is api.flash_attn_func and len(called) == 1


def test_a_transformers_that_changed_is_named(monkeypatch):
    """Fails when transformers renames what `register` wraps; there the error names the supported versions."""
    monkeypatch.delattr(flash_utils, "_lazy_imports")
    with pytest.raises(
        ImportError, match=r"_lazy_imports, which transformers .* does not have. Supported: transformers"
    ):
        transformers_attention.register()
