"""PagedCache.decode_step: the forward inside compiles once for all lengths, and neither it nor its planning waits for
the device."""

import doctest
import functools
import re
import shutil

import pytest
import torch
from helpers import assert_close, left_padded_batch, tiny_model
from test_paged_layers import MORE_MODELS, unusual_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from hf_efficient import PagedCache
from hf_efficient.cache import paged_layer
from hf_efficient.cache.stores.kv_formats import KV_FORMATS


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def shared_llama():
    return tiny_model("llama", num_hidden_layers=1)


def compiled(model, backend="eager"):
    """The model's forward as one graph, and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model.forward, fullgraph=True, backend=counter), counter


def prefill(model, cache, inputs):
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return model(**inputs, position_ids=positions, past_key_values=cache).logits[:, -1:]


@torch.no_grad()
def decode(model, forward, cache, inputs, steps):
    """Greedy tokens [B, steps] and their logits [B, steps, vocabulary] after a prompt run by `model`, with the steps
    run by `forward`; by `model` as if there were no decode_step when that is None."""
    logits = [prefill(model, cache, inputs)]
    for _ in range(steps - 1):
        token = logits[-1].argmax(-1)
        if forward is None:
            positions = torch.tensor(cache.cache_seqlens, device=token.device)[:, None]
            logits.append(model(token, position_ids=positions, past_key_values=cache).logits)
        else:
            with cache.decode_step() as positions:
                logits.append(forward(token, position_ids=positions, past_key_values=cache).logits.clone())
    logits = torch.cat(logits, 1)
    return logits.argmax(-1), logits


def test_one_compilation_while_the_cache_grows(llama):
    """The whole compiler where there is one for C++; its code must write the pages in place."""
    model, inputs = llama, left_padded_batch()
    model.set_attn_implementation("eager")
    options = dict(do_sample=False, max_new_tokens=101, eos_token_id=-1)
    expected = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
    model.set_attn_implementation("flash_paged")
    backend = "inductor" if shutil.which("g++") or shutil.which("c++") or shutil.which("clang++") else "aot_eager"
    forward, counter = compiled(model, backend)
    cache = PagedCache(model.config, block_size=8, num_blocks=48)
    (tokens, logits), sources = run_and_get_code(lambda: decode(model, forward, cache, inputs, 101))
    assert counter.frame_count == 1 and cache.cache_seqlens == [105, 111, 108]
    for source in sources:  # the op is given the pages themselves, the inputs of the graph, and no copy
        assert re.search(r"flash_attn_with_kvcache\.default\(\w+, arg\d+_1, arg\d+_1, ", source)
    assert len(sources) == (backend == "inductor")
    plain_tokens, plain_logits = decode(model, None, PagedCache(model.config, block_size=8), inputs, 20)
    assert torch.equal(tokens, expected) and torch.equal(plain_tokens, expected[:, :20])
    assert_close(logits[:, :20], plain_logits, 1e-5, 1e-3, "float32 with fused operations: sums in another order")

    cache = PagedCache(model.config, block_size=8, num_blocks=48)  # another cache of this size
    assert torch.equal(decode(model, forward, cache, inputs, 9)[0], expected[:, :9])
    cache.rewind([0, 0, 0])
    assert torch.equal(decode(model, forward, cache, inputs, 9)[0], expected[:, :9])
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma3n"])
def test_windows_sinks_and_shared_keys_in_one_graph(name):
    model = unusual_model(name) if name in MORE_MODELS else tiny_model(name)
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch()
    forward, counter = compiled(model)
    tokens, logits = decode(model, forward, PagedCache(model.config, block_size=8, num_blocks=16), inputs, 12)
    expected, expected_logits = decode(model, None, PagedCache(model.config, block_size=8), inputs, 12)
    assert torch.equal(tokens, expected) and counter.frame_count == 1
    assert_close(logits, expected_logits, 1e-5, 1e-3, "float32: sums in another order")


def test_a_growing_pool_compiles_again_at_most_once(llama):
    forward, counter = compiled(llama)
    inputs = left_padded_batch()
    tokens, _ = decode(llama, forward, PagedCache(llama.config, block_size=8), inputs, 60)
    assert torch.equal(tokens, decode(llama, None, PagedCache(llama.config, block_size=8), inputs, 60)[0])
    assert counter.frame_count <= 2  # the second time with sizes left open


@pytest.mark.parametrize("num_blocks", [None, 40])
@pytest.mark.parametrize("seed", range(2))
@torch.no_grad()
def test_operations_between_steps(llama, num_blocks, seed):
    """Planned steps of several widths among plain forwards, rewinds, forks and selections: every row as it would be
    alone."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    cache = PagedCache(llama.config, block_size=8, num_blocks=num_blocks)
    rows = list(draw(3, 128, 3, 14))
    llama(torch.stack(rows), past_key_values=cache)
    for _ in range(12):
        operation = int(draw(0, 6))
        if operation == 0:
            lengths = [int(draw(1, len(row) + 1)) for row in rows]
            cache.rewind(lengths)
            rows = [row[:length] for row, length in zip(rows, lengths)]
            continue
        if operation == 1:
            indices = draw(0, len(rows), int(draw(1, 4)))
            cache.reorder_cache(indices)
            rows = [rows[index] for index in indices]
            continue
        tokens = draw(3, 128, len(rows), int(draw(1, 4)))
        if operation == 2:
            positions = torch.tensor(cache.cache_seqlens)[:, None] + torch.arange(tokens.shape[1])
            logits = llama(tokens, position_ids=positions, past_key_values=cache).logits
        else:
            with cache.decode_step(tokens.shape[1]) as positions:
                logits = llama(tokens, position_ids=positions, past_key_values=cache).logits
        rows = [torch.cat(pair) for pair in zip(rows, tokens)]
        assert cache.cache_seqlens == [len(row) for row in rows] and cache.get_seq_length() == max(map(len, rows))
        for row, row_logits in zip(rows, logits):
            alone = llama(row[None], use_cache=False).logits[0, -tokens.shape[1] :]
            torch.testing.assert_close(row_logits, alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_positions_follow_the_columns_when_none_are_given(llama):
    ids = torch.randint(3, 128, (2, 9))
    forward, counter = compiled(llama)
    cache = PagedCache(llama.config, num_blocks=8)
    llama(ids[:, :5], past_key_values=cache)
    parts = []
    for column in range(5, 9):
        with cache.decode_step():
            parts.append(forward(ids[:, column : column + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), llama(ids).logits[:, 5:], rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("width", [1, 3])
@torch.no_grad()
def test_decode_reads_nothing_back(llama, width):
    """On the meta device, where every tensor has a shape and reading a value raises: the forward with and without
    decode_step, with rows that share blocks and copy them."""
    llama.to("meta")
    ids = torch.zeros(2, 21, dtype=torch.long, device="meta")
    cache = PagedCache(llama.config, block_size=8)
    llama(ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    new = ids[:, :width].repeat(2, 1)
    for _ in range(12):
        llama(new, past_key_values=cache)
        with cache.decode_step(width) as positions:
            llama(new, position_ids=positions, past_key_values=cache)
    assert cache.cache_seqlens == [21 + 24 * width] * 4


@torch.no_grad()
def test_a_mask_on_an_accelerator_is_read_for_the_prompt_only(llama):
    cache = PagedCache(llama.config)
    mask = torch.ones(2, 6, dtype=torch.long, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):  # what the tests above rely on
        cache.state.plan_tokens(2, 6, mask)
    prefill(llama, cache, left_padded_batch((4, 6)))
    cache.state.plan_tokens(2, 1, torch.ones(2, 7, device="meta"))
    assert cache.cache_seqlens == [5, 7]
    with pytest.raises(ValueError, match=r"shape \(2, 7\).*\(2, 8\)"):
        cache.state.plan_tokens(2, 1, torch.ones(2, 7, device="meta"))


@torch.no_grad()
def test_a_forward_that_raises_leaves_the_cache_as_it_was(llama):
    inputs = left_padded_batch((4, 9))
    cache, reference = PagedCache(llama.config, num_blocks=4), PagedCache(llama.config)
    token = prefill(llama, cache, inputs).argmax(-1)
    prefill(llama, reference, inputs)
    with pytest.raises(ZeroDivisionError):
        with cache.decode_step():
            raise ZeroDivisionError
    assert cache.cache_seqlens == [4, 9] and cache.get_seq_length() == 9 and cache.num_used_blocks == 2
    with pytest.raises(ValueError, match=r"width=1\).*2 sequences.*2 sequences of 2 columns"):
        with cache.decode_step():
            llama(token.expand(2, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        with cache.decode_step():
            llama(token, attention_mask=torch.ones(2, 10), past_key_values=cache)
    for misuse in (lambda: cache.crop(-1), lambda: cache.rewind([1, 1]), lambda: cache.decode_step().__enter__()):
        with pytest.raises(RuntimeError, match="only the forward itself"):
            with cache.decode_step():
                misuse()
    with pytest.raises(ValueError, match=r"num_blocks=4.*needs 5 blocks"):
        cache.decode_step(25).__enter__()
    logits = []
    for held in (cache, reference):
        with held.decode_step() as positions:
            logits.append(llama(token, position_ids=positions, past_key_values=held).logits)
    assert torch.equal(*logits) and cache.cache_seqlens == [5, 10]


@torch.no_grad()
def test_what_cannot_be_planned(llama, monkeypatch):
    cache = PagedCache(llama.config)
    with pytest.raises(RuntimeError, match="run the prompt"):
        cache.decode_step().__enter__()
    token = torch.ones(1, 1, dtype=torch.long)
    llama(token, past_key_values=cache)
    for width in (0, 1.5, True):
        with pytest.raises(ValueError, match="width=.*positive integer"):
            cache.decode_step(width).__enter__()
    with pytest.raises(Exception, match=r"with cache.decode_step\(\)"):
        compiled(llama)[0](token, past_key_values=cache)
    monkeypatch.setattr(paged_layer, "PAGES", "lost")  # a model that changes its keys after update()
    forward = compiled(llama)[0]
    with pytest.raises(RuntimeError, match="layer 0 never reached"):
        with cache.decode_step():
            forward(token, past_key_values=cache)
    llama.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="flash_paged.*'sdpa'"):
        cache.decode_step().__enter__()


def test_the_example_of_the_docstring(llama, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    input_ids = left_padded_batch((5, 5))["input_ids"]
    (test,) = doctest.DocTestFinder(recurse=False).find(
        PagedCache,
        "PagedCache",
        globs={"torch": torch, "PagedCache": PagedCache, "model": llama, "input_ids": input_ids},
    )
    results = doctest.DocTestRunner().run(test)
    assert results.attempted > 3 and results.failed == 0


@pytest.mark.gpu
def test_a_cuda_graph_replayed_while_lengths_grow():
    """One graph for all lengths; nothing in the loop, in_decode_step or not, waits for the GPU."""
    model = tiny_model("llama", head_dim=32, attn_implementation="flash_paged").cuda()
    inputs = {name: tensor.cuda() for name, tensor in left_padded_batch().items()}
    expected, expected_logits = decode(model, None, PagedCache(model.config), inputs, 100)
    cache = PagedCache(model.config, num_blocks=64)
    with torch.no_grad():
        token = prefill(model, cache, inputs).argmax(-1)
        tokens, logits = [token.clone()], []

        def forward(positions):
            return model(token, position_ids=positions, past_key_values=cache).logits

        with cache.decode_step() as positions:  # builds the kernels
            forward(positions)
        cache.crop(-1)
        graph = torch.cuda.CUDAGraph()
        with cache.decode_step() as positions, torch.cuda.graph(graph):
            static_logits = forward(positions)
        cache.crop(-1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(99):
                with cache.decode_step():
                    graph.replay()
                logits.append(static_logits.clone())
                token.copy_(static_logits.argmax(-1))
                tokens.append(token.clone())
            model(token, position_ids=positions + 1, past_key_values=cache)  # in_decode_step by the first layer
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat(tokens, 1), expected)
    assert_close(torch.cat(logits, 1), expected_logits[:, 1:], 1e-5, 1e-3, "float32: keys split otherwise")
    with torch.no_grad(), pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            forward(positions)


@pytest.mark.gpu
def test_compiled_with_cuda_graphs():
    model = tiny_model("llama", head_dim=32, attn_implementation="flash_paged").cuda()
    inputs = {name: tensor.cuda() for name, tensor in left_padded_batch().items()}
    forward = torch.compile(model.forward, fullgraph=True, mode="reduce-overhead")
    tokens, logits = decode(model, forward, PagedCache(model.config, num_blocks=64), inputs, 60)
    expected, expected_logits = decode(model, None, PagedCache(model.config), inputs, 60)
    assert torch.equal(tokens, expected) and counters["inductor"]["cudagraph_skips"] == 0
    assert_close(logits, expected_logits, 1e-5, 1e-3, "float32: keys split otherwise")


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor needs a C++ compiler on a CPU"
)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_compiled_code_writes_pages_in_place(kv_format, shared_llama):
    """Inductor ends a graph with a copy of whole pages where it thinks that a view of them was changed."""
    shared_llama.set_attn_implementation("flash_paged")
    cache = PagedCache(shared_llama.config, kv_format=kv_format, num_blocks=8)
    forward = torch.compile(shared_llama.forward, fullgraph=True)
    token = torch.full((1, 1), 5)

    def step():
        with cache.decode_step() as positions:
            return forward(token, position_ids=positions, past_key_values=cache).logits

    with torch.no_grad():
        shared_llama(torch.arange(3, 10)[None], past_key_values=cache)
        _, sources = run_and_get_code(step)
    names = set(re.findall(r"cpp_fused_\w+", "".join(sources)))
    assert names and not [name for name in names if re.search(r"(?<!_to)_copy_(?!fused)", name)]
