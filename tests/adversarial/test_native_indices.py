"""Native instructions refuse an index out of range, with transformers' exception where it has one."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_model

from hf_efficient import enable_speculation
from hf_efficient.generation import served
from hf_efficient.kernels.attention import native_cpu
from hf_efficient.kernels.linear import contextual_mlp
from hf_efficient.kernels.native import build
from hf_efficient.kernels.replay.recorder import Capture, _interpret, interpreter


pytestmark = [
    pytest.mark.native_loop,
    pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU"),
]
LIMIT = {"gpt2": "n_positions", "opt": "max_position_embeddings"}


@pytest.mark.parametrize("bad", [7, 8, 1 << 40, -1, -(1 << 62)])
@pytest.mark.parametrize("place", [0, 4])
def test_a_look_up_beyond_the_table(bad, place):
    weight, index = torch.randn(7, 40), torch.tensor([0, 6, 3, 2, 1])
    capture = Capture(lambda: F.embedding(index, weight))
    assert [step.func for step in capture._steps] == [_interpret], "an instruction and no call of torch"
    before = capture.replay().clone()
    index[place] = bad
    with pytest.raises(IndexError) as torchs:
        F.embedding(index, weight)
    with pytest.raises(IndexError) as ours:
        capture.replay()
    assert str(ours.value) == str(torchs.value) and torch.equal(capture.output, before), "nothing is written"
    index[place] = 5
    assert torch.equal(capture.replay(), weight[index])


def test_look_ups_of_other_forms():
    """int32 indices, and tables and indices that are not contiguous."""
    weight, index = torch.randn(7, 40), torch.tensor([[0, 6], [3, 2]])
    narrow = index.int()
    looked_up = (narrow, weight), (index.t(), weight), (index, weight.t())
    capture = Capture(lambda: tuple(F.embedding(*each) for each in looked_up))
    index[1, 0], narrow[1, 0] = 5, 4
    expected = weight[narrow.long()], weight[index.t()], weight.t()[index]
    assert all(map(torch.equal, capture.replay(), expected))
    narrow[0, 1] = 7
    with pytest.raises(IndexError):
        capture.replay()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_that_is_broadcast(dtype):
    x, weight, bias = torch.randn(3, 64).to(dtype), torch.randn(24, 64).to(dtype), torch.randn(1).to(dtype)
    capture = Capture(lambda: torch.addmm(bias, x, weight.t()))
    bias.fill_(5)
    torch.testing.assert_close(capture.replay(), torch.addmm(bias, x, weight.t()), rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIMIT)
def test_positions_end_where_those_of_transformers_do(name, dtype, monkeypatch):
    model = enable_speculation(tiny_model(name, dtype, eos_token_id=None, **{LIMIT[name]: 40}))
    replays, replay = [], Capture.replay
    monkeypatch.setattr(Capture, "replay", lambda *args: replays.append(1) or replay(*args))

    def generate(rows, new, ours, **options):
        ids = torch.arange(3, 8).expand(rows, -1)
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(served, "serves", lambda *args: False)
            return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)

    for rows in (1, 3):
        last = generate(rows, 36, False)  # whose last token is never fed
        replays.clear()
        assert torch.equal(generate(rows, 36, True), last) and replays
        speculative = generate(rows, 36, True, prompt_lookup_num_tokens=5)
        assert torch.equal(speculative, last), "a draft never reaches beyond the positions"
        replays.clear()
        for ours in (False, True):
            with pytest.raises(IndexError, match="index out of range in self"):
                generate(rows, 60, ours)
        assert len(replays) > 20, "the last forwards were replayed"
        assert torch.equal(generate(rows, 36, True), last), "and the next call is as before"


@pytest.mark.parametrize("what", ["block", "length", "table"])
def test_blocks_and_lengths_beyond_the_pages(what):
    """Of a captured attention, whose tables and lengths change between replays."""
    from hf_efficient.kernels.attention import api

    keys, values = torch.randn(2, 6, 16, 2, 32)
    table, lengths = torch.tensor([[0, 2], [4, 5]], dtype=torch.int32), torch.tensor([3, 17], dtype=torch.int32)
    q, new_keys, new_values = torch.randn(2, 1, 4, 32), *torch.randn(2, 2, 1, 2, 32)

    def attend():
        where = dict(cache_seqlens=lengths, block_table=table, causal=True)
        return api.flash_attn_with_kvcache(q, keys, values, new_keys, new_values, **where)

    capture = Capture(attend)
    assert [step.func for step in capture._steps] == [_interpret]
    before = keys.clone(), values.clone()
    if what == "block":
        table[1, 1] = 6
    elif what == "length":
        lengths[1] = 1 << 30
    else:
        lengths[0] = 32  # the new token has no block
    with pytest.raises(RuntimeError, match="lengths or blocks beyond the pages"):
        capture.replay()
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_weights_of_other_shapes_are_not_pointed_to():
    """The op of contextual sparsity: torch's operators name the wrong shape, the kernel would read beyond it."""
    numbers = [torch.randn(shape).bfloat16() for shape in ((2, 64), (48,), (48, 64), (47, 64))]
    x, limit, right, short = numbers
    arguments = [None, None, None, torch.full_like(limit, -1), None, right, None, None, None, right, None, "relu"]
    assert contextual_mlp.native_call(torch.empty_like(x), x, *arguments) is not None
    for place in (5, 9):
        wrong = [*arguments[:place], short, *arguments[place + 1 :]]
        assert contextual_mlp.native_call(torch.empty_like(x), x, *wrong) is None
        with pytest.raises((RuntimeError, IndexError)):
            torch.ops.hf_efficient.contextual_mlp(x, *wrong)


OVERRUN = """
import ctypes, torch
from hf_efficient.kernels.replay.recorder import interpreter
from hf_efficient.kernels.replay.instructions import OPS, Instruction, Operand
x, y = torch.zeros(100), torch.zeros(4000)
one = Instruction(OPS["COPY"], (ctypes.c_int64 * 4)(1, {rows}, 1, {count}))
one.y, one.a = (Operand(t.data_ptr(), (ctypes.c_int64 * 4)(0, {stride}, 0, 1), 0) for t in (y, x))
interpreter()(ctypes.addressof(one), 1)
"""


@pytest.mark.skipif(not os.environ.get(build.SANITIZE), reason="`make sanitize` runs this")
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(rows=1, count=101, stride=0), "AddressSanitizer: heap-buffer-overflow"),
        (dict(rows=3, count=1, stride=1 << 62), "runtime error: "),
    ],
)
def test_the_sanitizers_see_an_overrun(sizes, words):
    """`make sanitize` can fail: an instruction that reads one number too many, and one whose arithmetic overflows."""
    result = subprocess.run([sys.executable, "-c", OVERRUN.format(**sizes)], capture_output=True, text=True)
    assert result.returncode and words in result.stderr, result.stderr[-2000:]
    fine = subprocess.run([sys.executable, "-c", OVERRUN.format(rows=1, count=100, stride=0)], capture_output=True)
    assert fine.returncode == 0


def test_sanitized_libraries_are_others(monkeypatch):
    monkeypatch.delenv(build.SANITIZE, raising=False)
    assert build.sanitizer_flags() == []
    monkeypatch.setenv(build.SANITIZE, "address,undefined")
    assert "-fsanitize=address,undefined" in build.sanitizer_flags()
    assert native_cpu.kernel(torch.float32) is not None
