"""A captured forward, replayed, gives what the forward gives, for other tokens and lengths than it was captured
with."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import TINY_MODELS, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_efficient import PagedCache, WeightOnlyConfig, enable_speculation
from hf_efficient.generation import loop, model_state
from hf_efficient.generation.replay.captured_forward import can_be_captured
from hf_efficient.kernels.replay import fusion
from hf_efficient.kernels.replay.likeliest import MOST
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable, _interpret, as_one_step, interpreter


pytestmark = [
    pytest.mark.native_loop,
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU"),
]


def everything(x, y, weight, bias, index):
    """Each operator, views, broadcasting and in-place ops; x and y [3, 1, 40], weight [24, 40], bias [24], index int64
    [3, 1]."""
    z = x.float()
    z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)
    parts = [F.silu(z), F.gelu(z), F.gelu(z, approximate="tanh"), z.tanh(), z.sigmoid(), z.exp()]
    parts += [z.abs().sqrt(), z.relu()]
    parts += [z.cos(), z.sin(), -z, z.abs().pow(1.5), (z.abs() + 1).reciprocal(), z - 2 * y, z.add(y, alpha=0.5), z / 3]
    z = torch.cat(parts, 1).to(x.dtype)
    half = z[..., 20:]
    z = z + torch.cat((-half, z[..., :20]), -1) * y[:, :, :1]
    z = z.transpose(0, 1).contiguous().add_(1.5)
    rows = F.embedding(index, weight)
    return F.linear(z[:2] + rows.transpose(0, 1), weight, bias), F.linear(z[0], weight), z.sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators(dtype, tier):
    weight, bias = torch.randn(24, 40, dtype=dtype), torch.randn(24, dtype=dtype)
    (x, y), index = torch.randn(2, 3, 1, 40, dtype=dtype), torch.tensor([[0], [5], [23]])
    capture = Capture(lambda: everything(x, y, weight, bias, index))
    called = sum(getattr(step, "func", None) is not _interpret for step in capture._steps)
    assert called == 1, "add_, in place: all others are instructions"
    for _ in range(3):
        for tensor in (x, y):
            tensor.copy_(torch.randn(3, 1, 40))
        index.copy_(torch.randint(24, (3, 1)))
        for output, expected in zip(capture.replay(), everything(x, y, weight, bias, index)):
            error = (output.float() - expected.float()).norm() / expected.float().norm()
            # the same roundings but for sums and exponentials; one of bfloat16 is 2^-9 of a number
            assert error < (1e-6 if dtype is torch.float32 else 2e-3)


def test_a_step_may_read_numbers():
    x, calls = torch.tensor([[3.0, 1.0], [2.0, 5.0]]), []

    def chosen(x, bias):
        calls.append(x.argmax(1).tolist())
        return torch.stack([x[row, column] for row, column in enumerate(calls[-1])]) + (0 if bias is None else bias)

    capture = Capture(lambda: as_one_step(chosen, x * 2, None) + as_one_step(chosen, x, x[0]))
    assert torch.equal(capture.output, torch.tensor([12.0, 16.0]))
    x.copy_(torch.tensor([[1.0, 4.0], [7.0, 0.0]]))
    assert torch.equal(capture.replay(), torch.tensor([13.0, 25.0]))
    assert calls == [[0, 1]] * 2 + [[1, 0]] * 2
    assert torch.equal(as_one_step(chosen, x, None), torch.tensor([4.0, 7.0]))


def test_exponentials_of_the_largest_and_smallest(tier):
    x = torch.zeros(7)
    capture = Capture(lambda: x.exp())
    x.copy_(torch.tensor([89.0, torch.inf, 88.0, -torch.inf, -200.0, -87.0, torch.nan]))
    torch.testing.assert_close(capture.replay(), x.exp(), rtol=1e-6, atol=0, equal_nan=True)


def test_a_size_that_nobody_reads():
    x, number = torch.ones(3), torch.tensor(5)

    def forward():
        torch.ones(2, number + 1)
        return x + 1

    capture = Capture(forward)
    x.fill_(2)
    assert torch.equal(capture.replay(), torch.full((3,), 3.0))
    with pytest.raises(NotReplayable, match="size"):
        Capture(lambda: x + torch.ones(2, number + 1))
    with pytest.raises(NotReplayable, match="size"):
        Capture(lambda: torch.ones(2, number + 1).shape)


def test_operators_of_several_forms(tier):
    x, least = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([3.0, 0.0, 2.5])
    capture = Capture(lambda: (x.clamp(min=least), x.clamp(max=4)))
    x.copy_(torch.tensor([4.0, -1.0, 9.0]))
    raised, lowered = capture.replay()
    assert raised.tolist() == [4.0, 0.0, 9.0] and lowered.tolist() == [4.0, -1.0, 4.0]


def test_what_the_interpreter_does_not_know_is_called():
    """Other types and shapes of operators that it knows."""
    x, index = torch.randn(2, 3), torch.tensor([[4, 5], [6, 7]])

    def forward():
        together = torch.cat([index, index.float() + 1, index.t().to(torch.int32)], 1)
        scalar, wide = torch.tensor(2.0), torch.cat([x, x.double()])
        return together * 2, x.mean(), x.mean(0), scalar.mean(-1) + x, x.double() + 1, wide

    capture = Capture(forward)
    x.copy_(torch.randn(2, 3))
    index.add_(3)
    for output, expected in zip(capture.replay(), forward()):
        assert output.dtype is expected.dtype
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 16, 511, 513, 3000])
def test_where_the_largest_is(dtype, width, tier):
    """The first of equals, zeros of both signs among them, or of NaNs."""
    x = torch.zeros(2, 3, width, dtype=dtype)
    capture = Capture(lambda: x.argmax(-1))
    assert operations(capture) == {"ARGMAX": 1}
    few = torch.randint(-2, 3, x.shape)  # the largest comes often
    for values in (torch.randn(x.shape), few, -few.abs() * 1.0, -few.abs() * 0.0, torch.full(x.shape, -torch.inf)):
        x.copy_(values)
        assert torch.equal(capture.replay(), x.argmax(-1))
    for sign in (1.0, -1.0):
        x.copy_(torch.where(torch.rand(x.shape) < 0.1, torch.tensor(torch.nan).copysign(torch.tensor(sign)), few))
        assert torch.equal(capture.replay(), x.argmax(-1))


@pytest.mark.parametrize("rows, width, wanted", [(1, 4096, 8), (3, 5, 5), (40, 1300, MOST), (2, 17, 1)])
def test_the_largest_of_rows(rows, width, wanted, tier):
    x = torch.randn(rows, width)
    capture = Capture(lambda: torch.ops.hf_efficient.likeliest(x, wanted))
    assert all(getattr(step, "func", None) is _interpret for step in capture._steps)
    for change in (0.0, -torch.inf, torch.nan, torch.inf):
        x.copy_(torch.randn(rows, width))
        x[0, 1] = change
        softmax, values, indices = capture.replay()
        torch.testing.assert_close(softmax, x.softmax(-1), rtol=1e-5, atol=1e-8, equal_nan=True)
        assert values.nan_to_num(9).equal(softmax.topk(wanted).values.nan_to_num(9))
        assert softmax.gather(1, indices).nan_to_num(9).equal(values.nan_to_num(9))
    x.fill_(2.0)
    assert capture.replay()[2].equal(torch.arange(wanted).expand(rows, -1)), "of equal ones the first"


def test_of_equal_numbers_topk_takes_those_that_it_takes_alone(tier):
    """Experts are chosen by it: ties of a router's scores in 16 bits are common."""
    x = torch.randint(0, 4, (64, 128)).float()
    capture = Capture(lambda: x.softmax(-1).topk(8))
    x.copy_(torch.randint(0, 4, x.shape))
    assert capture.replay()[1].equal(x.softmax(-1).topk(8).indices)


def test_what_reads_numbers_is_refused():
    x = torch.randn(4)
    on_the_host = (lambda: x * x.sum().item(), lambda: x * x.tolist()[0], lambda: x.numpy())
    for forward in (*on_the_host, lambda: x[x > 0], lambda: x.nonzero(), lambda: torch.rand_like(x)):
        with pytest.raises(NotReplayable, match="the forward calls "):
            Capture(forward)


def decode(model, cache, tokens, capture=None):
    with torch.no_grad(), cache.decode_step(tokens.shape[1]) as positions:
        if capture is not None:
            return capture.replay()
        return model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits


def captured(model, cache, tokens):
    with cache.decode_step(tokens.shape[1]) as positions:
        return Capture(
            lambda: model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits
        )


@pytest.mark.parametrize(
    ("name", "kv_format", "dtype"),
    [
        *((name, "auto", (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(TINY_MODELS)),
        *(("gpt2", "auto", torch.bfloat16), ("llama", "auto", torch.bfloat16), ("llama_tied", "auto", torch.float32)),
        *(("mistral", "int8", torch.bfloat16), ("mistral", "int4", torch.float32)),
    ],
)
def test_replayed_steps_are_those_of_the_model(name, kv_format, dtype, tier):
    model = tiny_model(name, dtype, attn_implementation="flash_paged")
    prompt = torch.randint(3, 128, (2, 20))
    block_size = 8 if kv_format == "auto" else 32
    caches = [PagedCache(model.config, num_blocks=40, block_size=block_size, kv_format=kv_format) for _ in range(2)]
    for cache in caches:
        with torch.no_grad():
            model(prompt, past_key_values=cache, use_cache=True)
    tokens = torch.randint(3, 128, (2, 1))
    try:
        capture = captured(model, caches[0], tokens)
    except NotReplayable as error:
        # OPT reads the length, experts read their choice
        return pytest.fail(str(error)) if name not in ("opt", "mixtral", "qwen3_moe", "gpt_oss") else None
    assert operations(capture)["CALL"] == model.config.num_hidden_layers, "attention, whatever the format of the pages"
    decode(model, caches[1], tokens)
    for _ in range(12):  # other tokens, more blocks
        tokens.copy_(torch.randint(3, 128, (2, 1)))
        expected, output = decode(model, caches[1], tokens), decode(model, caches[0], tokens, capture)
        error = (output.float() - expected.float()).norm() / expected.float().norm()
        # the same operations; sums are taken in another order, and bfloat16 rounds every one of them to 2^-9
        assert error < (1e-5 if dtype is torch.float32 else 1e-2)


def operations(capture) -> Counter:
    """How often each instruction occurs."""
    runs = [step.args[0] for step in capture._steps if getattr(step, "func", None) is _interpret]
    return Counter(fusion.NAMES[instruction.op] for run in runs for instruction in run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, None])
def test_fused_instructions_have_the_bits_of_separate_ones(bits, dtype, monkeypatch, tmp_path, tier):
    head_dim = 32 if dtype is torch.bfloat16 else 16  # halves of whole vectors, and less
    model = tiny_model("llama", head_dim=head_dim).to(dtype)
    if bits:
        model.save_pretrained(tmp_path)
        config = WeightOnlyConfig(bits=bits, group_size=32)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype)
    model.set_attn_implementation("flash_paged")
    tokens, logits, captures = torch.randint(3, 128, (3, 5)), [], []
    for fuse in (fusion.fuse, lambda program, outputs: program):
        monkeypatch.setattr(fusion, "fuse", fuse)
        cache = PagedCache(model.config, num_blocks=12)
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True)
        captures.append(captured(model, cache, tokens))
        cache.rewind([5, 5, 5])
        logits.append(decode(model, cache, tokens, captures[-1]).clone())
    assert torch.equal(*logits)
    fused, separate = map(operations, captures)
    layers = model.config.num_hidden_layers
    assert fused["RMS_NORM"] == 2 * layers + 1 and fused["ROTARY"] == 2 * layers
    assert fused["GATED"] == layers
    assert not fused["POW"] + fused["NEG"] and separate["SILU"] == layers
    if bits:
        assert fused["LINEAR"] == 4 * layers and separate["LINEAR"] == 7 * layers, "q, k and v; gate and up"


def test_a_product_stays_behind_what_computes_its_weight():
    x, base, gate = torch.randn(2, 64).bfloat16(), torch.randn(32, 64).bfloat16(), torch.randn(64).bfloat16()
    capture = Capture(lambda: (F.linear(x, base), F.linear(x, base * gate)))
    for tensor in (x, gate):
        tensor.copy_(torch.randn(tensor.shape))
    for output, expected in zip(capture.replay(), (F.linear(x, base), F.linear(x, base * gate))):
        torch.testing.assert_close(output, expected, rtol=2**-7, atol=0.1)  # two roundings to bfloat16


def test_many_elements_are_shared_by_threads(tier):
    """Rows of more than one part, and columns that do not lie side by side."""
    x, y = torch.randn(3, 5, 1300).bfloat16(), torch.randn(1300, 5).t()
    capture = Capture(lambda: (x + x, x + y, 3 - y))
    for tensor in (x, y):
        tensor.copy_(torch.randn(tensor.shape))
    for output, expected in zip(capture.replay(), (x + x, x + y, 3 - y)):
        assert torch.equal(output, expected)


@pytest.mark.parametrize("shape", [(40, 1300), (3, 5, 1300)])
def test_gates_and_norms_are_shared_by_threads(shape, tier):
    """The same bits from any number of threads, with columns beyond the last whole vector."""
    gate, up = (torch.randn(shape).bfloat16() for _ in range(2))
    norm, results = LlamaRMSNorm(shape[-1]).bfloat16(), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            capture = Capture(lambda: (F.silu(gate) * up, norm(up)))
            results.append([x.clone() for x in capture.replay()])
    finally:
        torch.set_num_threads(threads)
    assert operations(capture)["GATED"] == 1
    expected = F.silu(gate) * up, norm(up)
    for found in results:
        for x, first, right in zip(found, results[0], expected):
            assert torch.equal(x, first)
            torch.testing.assert_close(x, right, rtol=2**-6, atol=2**-7)  # roundings to bfloat16 in another order


def test_what_is_read_elsewhere_is_not_fused():
    gate, up = torch.randn(2, 3, 40)
    capture = Capture(lambda: (F.silu(gate) * up, (hidden := F.silu(up)) * gate, hidden + 1))
    assert operations(capture)["GATED"] == 1 and operations(capture)["SILU"] == 1
    for part in (gate, up):
        part.copy_(torch.randn(3, 40))
    expected = F.silu(gate) * up, F.silu(up) * gate, F.silu(up) + 1
    for output, right in zip(capture.replay(), expected):
        torch.testing.assert_close(output, right)


def test_models_that_somebody_watches_are_not_captured(monkeypatch, llama):
    assert can_be_captured(llama)
    hook = llama.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert not can_be_captured(llama)
    hook.remove()
    assert can_be_captured(llama) and not can_be_captured(llama.train())
    llama.eval()
    monkeypatch.setattr(llama.model.layers[1], "forward", lambda *args, **kwargs: None)
    assert not can_be_captured(llama)


def test_captured_forwards_are_kept_until_the_model_changes():
    model, ids = enable_speculation(tiny_model("llama", eos_token_id=None)), torch.randint(3, 128, (2, 9))

    def generate(ids=ids):
        output = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
        return output, (model_state.latest(model).pool.entries or [None])[-1]

    first, kept = generate()
    assert kept.captured._captures and generate()[1].cache is kept.cache
    other = torch.randint(3, 128, (2, 30))
    twin = enable_speculation(tiny_model("llama", eos_token_id=None))
    expected = twin.generate(other, max_new_tokens=10, pad_token_id=0)
    output, after = generate(other)
    assert torch.equal(output, expected) and after.cache is kept.cache
    alone, after = generate(ids[:1])
    assert torch.equal(alone, first[:1]) and after.cache is kept.cache, "fewer rows have room in it"
    assert set(after.captured._captures) == {(1, 1), (2, 1)} and torch.equal(generate()[0], first)
    more = generate(ids.repeat(2, 1))
    assert torch.equal(more[0], first.repeat(2, 1)) and more[1].cache is not kept.cache, "and more rows have not"
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    changed, after = generate()
    assert after.cache is not more[1].cache and not torch.equal(changed, first)
    seen = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(generate()[0], changed) and len(seen) == 10, "one who watches sees every forward"
    hook.remove()
    kept = generate()[1]
    with torch.inference_mode():
        output, after = generate(ids.clone())
    assert torch.equal(output, changed) and after.cache is kept.cache, "inference mode captures and replays the same"


@pytest.mark.parametrize("min_tokens", [8, 64])
def test_sequences_leave_by_halves_and_captures_stay(monkeypatch, min_tokens):
    """Forwards of sequences that have ended, of the rest of the batch where it may go on long enough, and of a whole
    batch again."""
    monkeypatch.setattr(loop, "MIN_TOKENS_TO_CAPTURE", min_tokens)
    model, ids = enable_speculation(tiny_model("llama", eos_token_id=None)), torch.randint(3, 128, (5, 9))
    longest = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    ends = [longest[row, 9 + 7 * row + 3].item() for row in range(5)]
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=ends)
    alone = [model.generate(row[None], **options)[0] for row in ids]
    made = []
    capture = Capture.__init__
    monkeypatch.setattr(Capture, "__init__", lambda self, *args: made.append(1) or capture(self, *args))
    for lookup in (None, 6):
        for again in (False, True):
            made.clear()
            output = model.generate(ids, **options, prompt_lookup_num_tokens=lookup)
            for row, right in zip(output, alone):
                assert torch.equal(row[: len(right)], right) and (row[len(right) :] == 0).all()
            assert not (again and made and lookup is None), "everything was captured in the first call"
    kinds = model_state.latest(model).pool.entries[-1].captured._captures
    rows = {sequences for *_, sequences, _ in kinds}
    assert rows == ({5, 1} if min_tokens == 64 else {5, 2, 1}), "one row was captured before"
