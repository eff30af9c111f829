"""`attn_implementation="flash_paged"` in transformers: every way to ask for it, and the traps on the way."""

import functools

import pytest
import torch
import transformers
from helpers import TINY_MODELS, assert_close, left_padded_batch, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers import modeling_flash_attention_utils as flash_utils

from hf_efficient import PagedCache
from hf_efficient.integrations import transformers_attention
from hf_efficient.kernels import attention


FLOAT32 = dict(rms=1e-5, maximum=1e-4, reason="float32 sums in another order")


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_architecture_equals_eager(name):
    """Left-padded batches (with and without a cache that is read in place), packed sequences, greedy tokens."""
    model, batch = tiny_model(name), left_padded_batch()
    tokens = batch["attention_mask"].bool()
    expected = logits(model, "eager", **batch)[tokens]
    assert_close(logits(model, "flash_paged", **batch, use_cache=False)[tokens], expected, **FLOAT32)
    cache = PagedCache(model.config, block_size=8)
    assert_close(logits(model, "flash_paged", **batch, past_key_values=cache)[tokens], expected, **FLOAT32)
    assert cache.cache_seqlens == [5, 11, 8]

    parts = [torch.randint(3, 128, (1, length)) for length in (4, 9, 6)]
    packed = dict(
        input_ids=torch.cat(parts, 1), position_ids=torch.cat([torch.arange(p.shape[1]) for p in parts])[None]
    )
    alone = torch.cat([logits(model, "eager", input_ids=part) for part in parts], 1)
    if name != "opt":  # OPT takes its positions from the mask
        assert_close(logits(model, "flash_paged", **packed, use_cache=False), alone, **FLOAT32)

    model.set_attn_implementation("eager")
    expected = model.generate(**batch, max_new_tokens=16, do_sample=False)
    model.set_attn_implementation("flash_paged")
    assert torch.equal(model.generate(**batch, max_new_tokens=16, do_sample=False), expected)


def test_packed_sequences_do_not_enter_a_paged_cache():
    model = tiny_model("llama")
    ids, positions = torch.randint(3, 128, (1, 7)), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="position_ids restart.*use_cache=False"):
        logits(model, "flash_paged", input_ids=ids, position_ids=positions, past_key_values=PagedCache(model.config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # gpt2 has no nn.Linear, where transformers looks for a dtype
def test_the_dtype_is_kept(name, dtype, monkeypatch):
    seen = set()
    original = attention.flash_attn_func
    spy = functools.wraps(original)(lambda *args, **kwargs: seen.add(args[0].dtype) or original(*args, **kwargs))
    monkeypatch.setattr(attention, "flash_attn_func", spy)
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


def test_training_says_what_to_do():
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    with pytest.raises(RuntimeError, match='train with attn_implementation="sdpa"'):
        model(torch.ones(1, 4, dtype=torch.long))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", attention.ATTENTION_NAMES)
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


def continuous(model, prompts):
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
        progress_bar=False,
    )
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_continuous_batching_equals_generate(name, monkeypatch):
    model, batch = tiny_model(name), left_padded_batch()
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
    model.set_attn_implementation("eager")
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("flash_paged")
    assert continuous(model, prompts) == expected


def test_decode_fast_path_of_continuous_batching(monkeypatch):
    """transformers turns it on for CUDA only, and for names with a 2 or 3 (trap A2): the name is checked here, and the
    path is taken by force."""
    from transformers.generation.continuous_batching import initialization
    from transformers.utils.generic import is_flash_attention_requested

    versions = {
        name: is_flash_attention_requested(requested_attention_implementation=name, version=[2, 3])
        for name in attention.ATTENTION_NAMES
    }
    assert versions == {"flash_paged": False, "hf-efficient/flash_paged_2": True}
    calls = []
    original = attention.flash_attn_with_kvcache

    @functools.wraps(original)
    def spy(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    def force(config, cb_config, user_requested):
        cb_config.max_blocks_per_request = 8

    monkeypatch.setattr(attention, "flash_attn_with_kvcache", spy)
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", force)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    model = tiny_model("llama")
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    model.set_attn_implementation("eager")
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    model.set_attn_implementation("hf-efficient/flash_paged_2")
    assert continuous(model, prompts) == expected
    flash_utils._loaded_implementation = None
    assert len(calls) >= 2 * 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_on_the_accelerator(name):
    """The Triton kernels behind the same names: prefill of a left-padded batch and ten decode steps, read from pages and
    without a paged cache."""
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

    assert [is_kernel(name) for name in attention.ATTENTION_NAMES] == [False, True]


def test_models_that_redirect_flash_attention():
    """Trap A3: gpt-oss sends every other flash name to a kernel of the Hub; a model that needs its own is refused."""
    model = tiny_model("gpt_oss")
    for name in attention.ATTENTION_NAMES:
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name

    class Sparse(type(model)):
        _compatible_flash_implementations = ["MiniMaxAI/msa"]

    with pytest.raises(ValueError, match=r"Sparse needs a kernel of its own \(\['MiniMaxAI/msa'\]\)"):
        Sparse._from_config(model.config, attn_implementation="flash_paged")


@pytest.mark.parametrize("name", ["Bloom", "Falcon"])  # no flash attention at all; attention that cannot be replaced
def test_models_without_replaceable_attention_are_refused(name):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match=f"{name}ForCausalLM does not support flash attention"):
        AutoModelForCausalLM.from_config(config, attn_implementation="flash_paged")


def test_masks_that_flash_attention_drops_are_refused():
    """Trap A10: transformers leaves out what a 2-D mask cannot say."""
    from transformers import masking_utils

    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
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
    four = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask with 4 dimensions"):
        logits(model, "flash_paged", input_ids=torch.ones(1, 6, dtype=torch.long), attention_mask=four)


def test_padding_is_masked():
    """Trap A1: an attention without a registered mask would see the padding."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert set(attention.ATTENTION_NAMES) <= set(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
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
    assert wrapped("flash_paged")[0] is attention.flash_attn_func and len(called) == 1


def test_a_transformers_that_changed_is_named(monkeypatch):
    """Fails when transformers renames what `register` wraps; there the error names the supported versions."""
    monkeypatch.delattr(flash_utils, "_lazy_imports")
    with pytest.raises(
        ImportError, match=r"_lazy_imports, which transformers .* does not have. Supported: transformers"
    ):
        transformers_attention.register()


def test_encoders():
    """Attention that is not causal, and cross attention."""
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    model, batch = transformers.BertModel(config).eval(), left_padded_batch()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**batch).last_hidden_state
        model.set_attn_implementation("flash_paged")
        actual = model(**batch).last_hidden_state
    tokens = batch["attention_mask"].bool()
    assert_close(actual[tokens], expected[tokens], **FLOAT32)
    sizes = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    config = transformers.BartConfig(
        vocab_size=128, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, **sizes
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    expected = model.generate(**batch, max_new_tokens=8, do_sample=False, num_beams=2)
    model.set_attn_implementation("flash_paged")
    assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False, num_beams=2), expected)
