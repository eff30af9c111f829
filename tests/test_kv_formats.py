"""PagedCache with quantized pages: what is stored, bit for bit, what attention makes of it, and generate() with every way of
moving, forking and rewinding rows."""

import copy
import functools

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from test_paged_layers import unusual_model
from torch._dynamo.testing import CompileCounterWithBackend

from hf_efficient import Offload, PagedCache
from hf_efficient.cache import group_store, quantized_store
from hf_efficient.cache.page_handle import PAGES
from hf_efficient.kernels.flash_paged import quantized_reference


FORMATS = ("int8", "fp8", "int4", "int2")
ROUTES = ("flash_paged", "sdpa")
HEADS, DIM = 2, 32


@pytest.fixture
def small_window(monkeypatch):
    """Rows quantize after a few tokens."""
    monkeypatch.setattr(group_store, "WINDOW", 8)


@functools.cache
def llama(layers: int = 2):
    return tiny_model("llama", num_hidden_layers=layers)


def config_of(route: str, **overrides):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=DIM, num_key_value_heads=HEADS, **overrides)
    model.set_attn_implementation(route)
    return model.config


def quantized(key: torch.Tensor, value: torch.Tensor, kv_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, H, D] (of int4 and int2: one group) as the references of the kernels quantize them."""
    if kv_format in ("int8", "fp8"):
        dtype = torch.int8 if kv_format == "int8" else torch.float8_e4m3fn
        pairs = (quantized_reference.quantize_tokens(x, dtype) for x in (key, value))
        return tuple(codes.float() * scale.float()[..., None] for codes, scale in pairs)
    bits = int(kv_format[3:])
    codes, scale, low = quantized_reference.quantize_groups(key, bits, 0)
    keys = low.float() + codes.float() * scale.float()
    channels = value.unflatten(-1, (max(1, DIM // {4: 64, 2: 32}[bits]), -1))
    codes, scale, low = quantized_reference.quantize_groups(channels, bits, -1)
    return keys, (low.float() + codes.float() * scale.float()).flatten(-2)


class Row:
    """What one row of one layer must hold: `exact` tokens, a pair [T, H, D], and `stored`, as they are read."""

    def __init__(self, kv_format: str):
        self.kv_format, self.in_pages = kv_format, 0
        self.exact = self.stored = (torch.zeros(0, HEADS, DIM),) * 2

    def append(self, key, value) -> None:
        new = (key, value) if self.kv_format in ("int4", "int2") else quantized(key, value, self.kv_format)
        self.exact = tuple(torch.cat(pair) for pair in zip(self.exact, (key, value)))
        self.stored = tuple(torch.cat(pair) for pair in zip(self.stored, new))

    def quantize(self, first: int, target: int, group: int) -> None:
        for start in range(first + self.in_pages, first + target, group):
            now = quantized(*(x[start : start + group] for x in self.exact), self.kv_format)
            self.stored = tuple(
                torch.cat([old[:start], new, old[start + group :]]) for old, new in zip(self.stored, now)
            )
        self.in_pages = target

    def rewind(self, length: int, first: int, target: int) -> None:
        self.stored = tuple(x[:length] for x in self.stored)
        if target < self.in_pages:  # what comes back from the pages is as it was there
            self.exact = tuple(
                torch.cat([x[: first + target], y[first + target :]]) for x, y in zip(self.exact, self.stored)
            )
        self.exact, self.in_pages = tuple(x[:length] for x in self.exact), target


class Harness:
    """A cache of one layer beside the `Row`s it must hold."""

    def __init__(self, kv_format, route, block_size, **kwargs):
        self.cache = PagedCache(config_of(route), block_size, kv_format, **kwargs)
        self.kv_format, self.route, self.rows = kv_format, route, []

    @property
    def store(self):
        return self.cache.layers[0].store

    def forward(self, batch: int, width: int, valid: torch.Tensor | None = None) -> None:
        """valid: bool [B, S]. Checks what comes back, and what is stored then."""
        self.rows = self.rows or [Row(self.kv_format) for _ in range(batch)]
        batch = len(self.rows)
        query, key, value = (torch.randn(batch, heads, width, DIM) for heads in (2 * HEADS, HEADS, HEADS))
        key[:, :, :, 3] += 20  # keys have channels far from zero
        before = copy.deepcopy(self.rows)
        got = self.cache.update(key, value, 0)
        if self.route == "flash_paged":
            options = dict(softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0, s_aux=None)
            got = getattr(got[0], PAGES).attend(query, key, value, valid, **options)
        for i, row in enumerate(self.rows):
            tokens = (x[i].transpose(0, 1) if valid is None else x[i].transpose(0, 1)[valid[i]] for x in (key, value))
            row.append(*tokens)
            old, new = len(before[i].stored[0]), len(row.stored[0])
            seen = [torch.cat([was, now[old:]]) for was, now in zip(before[i].stored, row.exact)]
            if self.kv_format in ("int4", "int2"):
                row.quantize(self.store.first, self.store.quantized[i], self.store.group)
            if self.route == "sdpa":
                for actual, expected in zip(got, seen):
                    torch.testing.assert_close(actual[i, :, :new].transpose(0, 1), expected)
                    assert not actual[i, :, new:].any()
            elif new > old:
                if valid is None and width <= 16 and any(len(row.stored[0]) for row in before):
                    seen = row.stored  # few tokens: the op appends them and reads the codes
                expected = attention(query[i] if valid is None else query[i][:, valid[i]], *seen)
                actual = got[i] if valid is None else got[i][valid[i]]
                torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)  # float32 and float64
        self.check()

    def check(self) -> None:
        lengths = self.cache.cache_seqlens
        assert lengths == [len(row.stored[0]) for row in self.rows]
        if sum(lengths):
            table = [blocks + [0] * (64 - len(blocks)) for blocks in self.cache.state.pool.tables]
            flat = self.store.gather(torch.tensor(table, dtype=torch.int32), lengths)
            for actual, name in zip(flat, (0, 1)):
                torch.testing.assert_close(actual, torch.cat([row.stored[name] for row in self.rows]))

    def rewind(self, lengths) -> None:
        self.cache.rewind(lengths)
        for i, (row, length) in enumerate(zip(self.rows, lengths)):
            grouped = self.kv_format in ("int4", "int2")
            row.rewind(length, *((self.store.first, self.store.quantized[i]) if grouped else (0, 0)))
        self.check()

    def select(self, rows) -> None:
        self.cache.reorder_cache(torch.tensor(rows))
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.check()


def attention(query, key, value):
    """query [Hq, S, D] at the end of key [T, Hk, D], value: float64 [S, Hq, Dv]."""
    key, value = (x.double().repeat_interleave(len(query) // HEADS, 1).transpose(0, 1) for x in (key, value))
    scores = query.double() @ key.transpose(1, 2) / DIM**0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("block_size", [8, None])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_format", FORMATS)
@torch.no_grad()
def test_every_token_through_everything(kv_format, route, block_size, small_window, monkeypatch):
    """Prompts, steps, forks, rewinds into the ring, into pages and into the first block: what is read is exact or exactly what
    the reference quantizes, and the attention that of these numbers."""
    if block_size is None:  # few tokens through the op, as on an accelerator
        monkeypatch.setattr(quantized_store, "WHOLE", 0)
    generator = torch.Generator().manual_seed(0)
    harness = Harness(kv_format, route, block_size)
    if route == "flash_paged":
        harness.forward(3, 90, left_padded_batch((90, 21, 3))["attention_mask"].bool())
    else:
        harness.forward(3, 90)
    in_pages = 0
    for _ in range(14):
        in_pages = max(in_pages, *(row.in_pages for row in harness.rows))
        harness.forward(3, int(torch.randint(1, 9, (), generator=generator)))
        lengths = harness.cache.cache_seqlens
        kind = int(torch.randint(4, (), generator=generator))
        if kind == 1:
            harness.select(torch.randint(len(lengths), (len(lengths),), generator=generator).tolist())
        elif kind == 2:
            harness.rewind([int(torch.randint(max(0, n - 60), n + 1, (), generator=generator)) for n in lengths])
        elif kind == 3:
            harness.forward(3, 30)
    harness.rewind([0, 5, *harness.cache.cache_seqlens[2:]])
    harness.forward(3, 60)
    if kv_format in ("int4", "int2"):
        assert in_pages >= 64


def test_the_rings_hold_whatever_may_come(small_window):
    """Steps of one token, each flush at its time, with rows of unequal length."""
    with torch.no_grad():
        harness = Harness("int4", "flash_paged", 8)
        harness.forward(2, 20, left_padded_batch((20, 9))["attention_mask"].bool())
        flushes = 0
        for _ in range(100):
            before = list(harness.store.quantized)
            harness.forward(2, 1)
            flushes += before != harness.store.quantized
    assert flushes >= 4 and harness.store.quantized[0] != harness.store.quantized[1]


@pytest.mark.parametrize("kv_format", FORMATS)
@torch.no_grad()
def test_codes_are_those_of_the_reference(kv_format):
    harness = Harness(kv_format, "sdpa", 32)
    harness.forward(1, 32 * 7)
    exact, pages, table = harness.rows[0].exact, harness.store.pages, harness.cache.state.pool.tables[0]
    block = 1 if kv_format in ("int4", "int2") else 0
    key, value = (x[32 * block : 32 * (block + 1)] for x in exact)
    if kv_format in ("int8", "fp8"):
        dtype = torch.int8 if kv_format == "int8" else torch.float8_e4m3fn
        expected = {}
        for name, tokens in (("key", key), ("value", value)):
            codes, expected[name + "_scales"] = quantized_reference.quantize_tokens(tokens, dtype)
            expected[name + "s"] = codes.view(pages[name + "s"].dtype)
    else:
        bits = int(kv_format[3:])
        codes, scale, low = quantized_reference.quantize_groups(key, bits, 0)
        expected = {"keys": quantized_reference.pack_codes(codes, bits), "key_scales": scale, "key_minima": low}
        codes, scale, low = quantized_reference.quantize_groups(value, bits, -1)
        expected |= {"values": quantized_reference.pack_codes(codes, bits), "value_scales": scale, "value_minima": low}
    assert expected.keys() == pages.keys()
    for name, tensor in expected.items():
        assert torch.equal(pages[name][table[block]], tensor), name


@pytest.mark.parametrize("kv_format, most", [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30), ("int2", 0.20)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_of_a_token(kv_format, most, head_dim):
    sizes = []
    for name in (kv_format, "auto"):
        config = tiny_model("llama", num_hidden_layers=1).config
        cache = PagedCache(config, kv_format=name)
        new = torch.zeros(1, 2, 1, head_dim, dtype=torch.bfloat16)
        cache.update(new, new, 0)
        store = cache.layers[0].store
        sizes.append(store.nbytes / store.capacity / cache.block_size)
    assert sizes[1] == 2 * 2 * 2 * head_dim and sizes[0] <= most * sizes[1]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_tensors_stay_while_rows_change_places(kv_format, small_window):
    """So that a CUDA graph of decode_step() stays valid."""
    with torch.no_grad():
        harness = Harness(kv_format, "flash_paged", 8, num_blocks=60)
        harness.forward(3, 60)
        before = [tensor.data_ptr() for tensor in harness.store.static_tensors()]
        harness.select([2, 0, 0])
        harness.forward(3, 1)
        harness.rewind([50, 61, 0])
        harness.forward(3, 20)
    assert before == [tensor.data_ptr() for tensor in harness.store.static_tensors()]


@torch.no_grad()
def test_too_many_tokens_for_the_rings_change_nothing():
    """Though the blocks of a growing pool have moved when that is found out."""
    model, ids = llama(), torch.randint(3, 128, (2, 200))
    model.set_attn_implementation("flash_paged")
    logits = []
    for width in (None, 600):
        cache = PagedCache(model.config, 8, "int4")
        model(ids, past_key_values=cache)
        if width is not None:
            with pytest.raises(ValueError, match="600 new tokens"), cache.decode_step(width):
                pass
        logits.append(model(ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*logits)


def generate(model, inputs, cache, new_tokens=40, **kwargs):
    inputs = {**inputs, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, **kwargs}
    return model.generate(**inputs, past_key_values=cache)


def logits_of(model, sequences, mask, new_tokens) -> torch.Tensor:
    """Without a cache: logits [B, new_tokens, vocabulary] of the last tokens of sequences [B, T], which began as prompts with
    `mask` [B, n]."""
    mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[:, -new_tokens - 1 : -1]


def regret(model, sequences, mask, new_tokens=40) -> float:
    """By how much the logits of the tokens chosen are below the largest, on average, in units of their spread. 2.4 for tokens
    chosen at random among 128."""
    logits = logits_of(model, sequences, mask, new_tokens)
    if model.generation_config.eos_token_id is not None:  # the end, which must not come
        logits[..., model.generation_config.eos_token_id] = -torch.inf
    chosen = logits.gather(-1, sequences[:, -new_tokens:, None])[..., 0]
    spread = logits[..., 3:].std(-1)
    return ((logits.amax(-1) - chosen) / spread).mean().item()


# Errors of the attention grow with fewer bits, and choices between near equal logits fall differently. A row or a token that is
# mixed up gives about 2.4.
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
    """Each beam is as likely as its score says, so rows keep their own tokens while beams are forked and dropped."""
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
    """A token's codes are its own: what a row generates in a ragged batch, with a draft model or after deepcopy is what it
    generates alone, to the token."""
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


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "gemma3n", "gemma4", "deepseek"])
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
def test_a_window_that_the_config_does_not_name(small_window):
    """Then the first block lies where the op would take it for near: tokens are put in order instead."""
    harness = Harness("int4", "flash_paged", 8)
    harness.forward(1, 60)
    query, key, value = (torch.randn(1, heads, 1, DIM) for heads in (2 * HEADS, HEADS, HEADS))
    options = dict(softmax_scale=None, causal=True, window_size=(20, 20), softcap=0.0, s_aux=None)
    actual = getattr(harness.cache.update(key, value, 0)[0], PAGES).attend(query, key, value, None, **options)
    tokens = (torch.cat([old, new[0].transpose(0, 1)])[-21:] for old, new in zip(harness.rows[0].stored, (key, value)))
    torch.testing.assert_close(actual[0].double(), attention(query[0], *tokens), rtol=1e-4, atol=1e-4)


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
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    prompt, new = torch.randint(3, 128, (2, 230)), torch.randint(3, 128, (2, 1))
    refused, plain = (PagedCache(model.config, kv_format="int2") for _ in range(2))
    with torch.no_grad():
        for cache in (refused, plain):
            model(prompt, past_key_values=cache)
        with pytest.raises(ValueError, match="500 new tokens in a row do not fit"), refused.decode_step(500):
            pass
        assert refused.cache_seqlens == [230, 230]
        actual, expected = (model(new, past_key_values=cache).logits for cache in (refused, plain))
    assert torch.equal(actual, expected)
