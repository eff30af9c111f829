"""PagedCache with quantized pages: generate() with every way of moving, forking and rewinding sequences."""

import copy

import kv_models
import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import FORMATS, ROUTES, llama
from test_paged_layers import unusual_model
from torch._dynamo.testing import CompileCounterWithBackend

from hf_efficient import Offload, PagedCache


small_window = pytest.fixture(kv_models.small_window)


def generate(model, inputs, cache, new_tokens=40, **kwargs):
    inputs = {**inputs, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, **kwargs}
    return model.generate(**inputs, past_key_values=cache)


def logits_of(model, sequences, mask, new_tokens) -> torch.Tensor:
    """Without a cache: logits [B, new_tokens, vocabulary] of the last tokens of sequences [B, T], which began as
    prompts with `mask` [B, n]."""
    mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, -new_tokens - 1 : -1]


def regret(model, sequences, mask, new_tokens=40) -> float:
    """By how much the logits of the tokens chosen are below the largest, on average, in units of their spread. 2.4 for
    tokens chosen at random among 128."""
    logits = logits_of(model, sequences, mask, new_tokens)
    if model.generation_config.eos_token_id is not None:  # the end, which must not come
        logits[..., model.generation_config.eos_token_id] = -torch.inf
    chosen = logits.gather(-1, sequences[:, -new_tokens:, None])[..., 0]
    spread = logits[..., 3:].std(-1)
    return ((logits.amax(-1) - chosen) / spread).mean().item()


# Errors of the attention grow with fewer bits, and choices between near equal logits fall differently. A sequence or a
# token that is mixed up gives about 2.4.
REGRET = {"int8": 0.01, "fp8": 0.05, "int4": 0.1, "int2": 0.6}


@pytest.mark.parametrize(
    "kv_format, route", [*((name, "flash_paged") for name in FORMATS), ("int8", "sdpa"), ("int2", "sdpa")]
)
def test_generate(kv_format, route, small_window):
    """Greedy, beams, a draft model and prompt lookup, on a ragged batch where that is possible, and after reset()."""
    model, draft = llama(), llama(1)
    model.set_attn_implementation(route)
    inputs = left_padded_batch((15, 30, 18))
    one = {name: tensor[1:2] for name, tensor in inputs.items()}
    cache = PagedCache(model.config, 8, kv_format)
    for given, kwargs in (
        (inputs, {}),
        (one, dict(assistant_model=draft)),
        (one, dict(prompt_lookup_num_tokens=3)),
        (inputs, dict(prefill_chunk_size=7)),
    ):
        cache.reset()
        sequences = generate(model, given, cache, **kwargs)
        assert regret(model, sequences, given["attention_mask"]) <= REGRET[kv_format], kwargs
        if kv_format in ("int4", "int2"):
            assert min(cache.layers[0].store.quantized) > 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_beams(kv_format, route, small_window):
    """Each beam is as likely as its score says: sequences keep their own tokens while beams are forked and dropped."""
    model = llama()
    model.set_attn_implementation(route)
    inputs, cache = left_padded_batch((15, 30)), PagedCache(model.config, 8, kv_format)
    beams = dict(num_beams=3, num_return_sequences=2, return_dict_in_generate=True, output_scores=True)
    result = generate(model, inputs, cache, **beams)
    mask = inputs["attention_mask"].repeat_interleave(2, 0)
    logs = logits_of(model, result.sequences, mask, 40).log_softmax(-1)
    true = logs.gather(-1, result.sequences[:, -40:, None]).mean((1, 2))
    # nat a token; beams that are mixed up are off by 1 and more
    assert (result.sequences_scores - true).abs().max() <= {"int8": 0.01, "fp8": 0.05, "int4": 0.1, "int2": 0.7}[
        kv_format
    ]


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_rows_do_not_depend_on_each_other(kv_format):
    """A token's codes are its own: what a row generates in a ragged batch, with a draft model or after deepcopy is what
    it generates alone, to the token."""
    model = llama()
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((15, 30, 18))
    together = generate(model, inputs, PagedCache(model.config, kv_format=kv_format))
    for row, length in enumerate((15, 30, 18)):
        alone = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        assert torch.equal(
            generate(model, alone, PagedCache(model.config, kv_format=kv_format)),
            together[row : row + 1, -length - 40 :],
        )


@pytest.mark.parametrize("kv_format", ["int8", "int2"])
def test_a_copy_goes_its_own_way(kv_format, small_window):
    model = llama()
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((40, 33))
    cache = PagedCache(model.config, 8, kv_format)
    with torch.no_grad():
        model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, past_key_values=cache)
    first = generate(model, inputs, copy.deepcopy(cache))
    assert torch.equal(generate(model, inputs, cache), first)


@pytest.mark.parametrize("kv_format", ["fp8", "int4"])
@torch.no_grad()
def test_decode_step_compiles_once(kv_format, small_window):
    """Compiled steps are the plain ones, also across quantizations of a group, and so is one after a failed step."""
    torch._dynamo.reset()
    model = llama(1)
    model.set_attn_implementation("flash_paged")
    counter = CompileCounterWithBackend("eager")
    forward = torch.compile(model.forward, fullgraph=True, backend=counter)
    inputs = left_padded_batch((5, 30))
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    runs = []
    for compiled in (True, False):
        cache = PagedCache(model.config, 8, kv_format, num_blocks=40)
        logits = [model(**inputs, position_ids=positions, past_key_values=cache).logits[:, -1:]]
        for step in range(50):
            token = logits[-1].argmax(-1) if compiled else runs[0][:, step : step + 1].argmax(-1)
            if compiled:
                if step == 20:
                    with pytest.raises(KeyError), cache.decode_step():
                        raise KeyError
                with cache.decode_step() as position_ids:
                    logits.append(forward(token, position_ids=position_ids, past_key_values=cache).logits.clone())
            else:
                position_ids = torch.tensor(cache.cache_seqlens)[:, None]
                logits.append(model(token, position_ids=position_ids, past_key_values=cache).logits)
        runs.append(torch.cat(logits, 1))
    assert counter.frame_count == 1
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-4)  # float32 in another order
    if kv_format in ("int4", "int2"):
        assert min(cache.layers[0].store.quantized) > 0
        with pytest.raises(ValueError, match="at most 33 at a time"), cache.decode_step(60):
            pass
        assert cache.cache_seqlens == [55, 80]


@pytest.mark.parametrize(
    "name, kv_format, route",
    [
        (name, kv_format, ROUTES[(index + place) % 2])
        for index, name in enumerate(("mistral", "gemma2", "gpt_oss", "gemma3n", "gemma4", "deepseek"))
        for place, kv_format in enumerate(("int8", "int4"))
    ],
)
def test_windows_sinks_and_unusual_layers(name, kv_format, route, small_window):
    """Sliding windows, softcap, sinks, keys shared between layers, two head dims, compressed latents."""
    model = unusual_model(name) if name in ("gemma3n", "gemma4", "deepseek") else tiny_model(name)
    if route == "sdpa" and not model._supports_sdpa:
        route = "eager"
    inputs = left_padded_batch((5, 30))
    model.set_attn_implementation(route)
    cache = PagedCache(model.config, 8, kv_format)
    sequences = generate(model, inputs, cache)
    model.set_attn_implementation("eager")
    assert regret(model, sequences, inputs["attention_mask"]) <= 2 * REGRET[kv_format]


@torch.no_grad()
@pytest.mark.parametrize("kv_format", ["fp8", "int4"])
@torch.no_grad()
def test_saved_rings_go_on(kv_format, tmp_path, small_window):
    model = llama()
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((40, 33))
    cache = PagedCache(model.config, 8, kv_format)
    model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, past_key_values=cache)
    cache.save(tmp_path / "pages")
    assert torch.equal(
        generate(model, inputs, PagedCache.load(tmp_path / "pages", model)), generate(model, inputs, cache)
    )


@pytest.mark.parametrize("kv_format", ["fp8", "int2"])
@torch.no_grad()
def test_pages_that_leave_the_device(kv_format, small_window):
    """Offloaded blocks come back as they were, those that are quantized late among them."""
    model = llama(4)
    model.set_attn_implementation("flash_paged")
    inputs, results = left_padded_batch((40, 33)), []
    for offload in (None, Offload(device_memory=1)):
        cache = PagedCache(model.config, 8, kv_format, offload=offload)
        prompt = generate(model, inputs, cache, new_tokens=20)
        cache.crop(-45)
        results.append(model(prompt[:, -45:], past_key_values=cache).logits)
    assert torch.equal(*results)


def test_one_block(small_window):
    """A pool whose only block stays in the ring."""
    model = llama()
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((5,))
    for kv_format in FORMATS:
        sequences = generate(model, inputs, PagedCache(model.config, 32, kv_format, num_blocks=1), new_tokens=20)
        assert regret(model, sequences, inputs["attention_mask"], 20) <= REGRET[kv_format]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_format, head_dim, multiple", [("int4", 20, 8), ("int2", 24, 16)])
def test_head_dims_that_do_not_pack(kv_format, head_dim, multiple, route):
    model = tiny_model("llama", head_dim=head_dim)
    model.set_attn_implementation(route)
    cache = PagedCache(model.config, kv_format=kv_format)
    with pytest.raises(ValueError, match=rf'{kv_format}.*of dim {head_dim}.*multiples of {multiple}; "auto", "int8"'):
        generate(model, left_padded_batch(), cache)
    assert cache.cache_seqlens == []
    assert generate(model, left_padded_batch(), PagedCache(model.config, kv_format="int8")).shape == (3, 51)


@pytest.mark.parametrize("kv_format", ["int3", "INT8", None, 8])
def test_unknown_formats(kv_format):
    with pytest.raises(ValueError, match=r"kv_format=.*must be one of auto, int8, fp8, int4, int2"):
        PagedCache(llama().config, kv_format=kv_format)


def test_a_refused_decode_step_changes_nothing():
    """Also when the growing pool has moved its blocks for it."""
    model = tiny_model("llama", attn_implementation="flash_paged")
    prompt, new = torch.randint(3, 128, (2, 230)), torch.randint(3, 128, (2, 1))
    refused, plain = (PagedCache(model.config, kv_format="int2") for _ in range(2))
    with torch.no_grad():
        for cache in (refused, plain):
            model(prompt, past_key_values=cache)
        with pytest.raises(ValueError, match="500 new tokens of a sequence do not fit"), refused.decode_step(500):
            pass
        assert refused.cache_seqlens == [230, 230]
        actual, expected = (model(new, past_key_values=cache).logits for cache in (refused, plain))
    assert torch.equal(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("kv_format", ["int4", "int2"])
def test_keys_with_outliers(kv_format, small_window):
    """Two channels of each head are 32 times as large in keys, and as much smaller in queries: the function is the
    same, and so is the error, as channels have scales of their own. One scale for all channels of a token would round
    the others to 0."""
    model = copy.deepcopy(llama())
    dim = model.config.head_dim
    channels = [1, 1 + dim // 2]  # a pair that RoPE turns
    tokens = torch.randint(3, model.config.vocab_size, (1, 96))
    found = []
    for factor in (1, 32):
        for layer in model.model.layers:
            attention = layer.self_attn
            for linear, by in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
                linear.weight.unflatten(0, (-1, dim))[:, channels] *= by
        logs = []
        for name in ("auto", kv_format):
            cache = PagedCache(model.config, 8, name)
            parts = [model(part, past_key_values=cache).logits for part in tokens.split(24, 1)]
            logs.append(torch.cat(parts, 1).log_softmax(-1))
        found.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item())
    assert found[0] > 0 and found[1] == pytest.approx(found[0], rel=0.02)


@torch.no_grad()
def with_drifting_keys():
    """(a model, tokens [1, 96]): two channels of each key have an offset before RoPE turns them, and grow from 15 to 50
    times the others along the tokens. No scale of a channel takes that away."""
    model, generator = tiny_model("llama", num_hidden_layers=2, attention_bias=True), torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    table, dim = model.get_input_embeddings().weight, model.config.head_dim
    table += torch.linspace(0, 8, len(table))[:, None] * table.std() * direction
    for layer in model.model.layers:
        keys = layer.self_attn.k_proj
        for tensor, added in ((keys.weight, 8 * direction), (keys.bias, 16)):
            tensor.unflatten(0, (-1, dim))[:, [1, 1 + dim // 2]] += added
    tokens = torch.randint(3, model.config.vocab_size, (1, 96), generator=generator)
    return model, tokens.sort().values


@torch.no_grad()
@pytest.mark.parametrize("kv_format, limit", [("int8", 0.006), ("fp8", 0.01), ("int4", 0.015), ("int2", 0.35)])
def test_keys_with_offsets_that_drift(kv_format, limit, small_window):
    """Measured: 0.0027, 0.0037, 0.0054 and 0.19. With one scale for the channels of a token it is 0.42 in 4 bits and
    1.0 in 2."""
    model, tokens = with_drifting_keys()
    model.set_attn_implementation("flash_paged")
    logs = []
    for name in ("auto", kv_format):
        cache = PagedCache(model.config, 8, name)
        logs.append(
            torch.cat([model(part, past_key_values=cache).logits for part in tokens.split(24, 1)], 1).log_softmax(-1)
        )
    assert (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean() < limit
