"""The C++ attention of sequences with different numbers of new tokens against float64, and what it refuses."""

import itertools

import pytest
import torch
from helpers import assert_close
from test_attention_torch_cpu import BFLOAT16, FLOAT32

from hf_efficient.kernels.attention import api, ragged
from hf_efficient.kernels.replay.recorder import Capture


pytestmark = pytest.mark.usefixtures("two_threads", "tier")
HEADS, GROUP, DIM, PAGE, PADDING = 2, 3, 16, 4, 5
NEW, PAST = [1, 1, 5, 0, 70, 3, 1], [0, 13, 3, 7, 9, 2, 30]
RING = dict(new=[1, 1, 3, 0, 1, 10], past=[0, 13, 2, 7, 33, 0], wrap=10)  # those that outgrow it take one token
# Prefixes of 16 pages that are read once for several sequences; the one in the middle has another.
SHARED = dict(new=[1] * 6 + [1, 2] + [2] * 6 + [9], past=[64, 70, 69, 81, 66, 65, 70, 64, 90, 68, 69, 71, 64, 67, 65])
SHARED["shared"] = 16


def make(dtype=torch.float32, new=NEW, past=PAST, wrap=0, shared=0):
    """The arguments of `attend_ragged` by position; pages in random order. shared: first pages of all sequences but the
    seventh."""
    generator = torch.Generator().manual_seed(0)
    longest = wrap or max(a + b for a, b in zip(new, past))
    table = torch.randperm(len(new) * -(-longest // PAGE), generator=generator).int().view(len(new), -1)
    table[[row for row in range(len(new)) if row != 6], :shared] = table[0, :shared].clone()
    tokens = sum(new) + PADDING
    shapes = (tokens, HEADS * GROUP, DIM), *[(tokens, HEADS, DIM)] * 2, *[(table.numel(), PAGE, HEADS, DIM)] * 2
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    return [*tensors, starts, torch.tensor(past, dtype=torch.int32), table]


def expected(arguments, wrap=0, left=-1, softmax_scale=DIM**-0.5, softcap=0.0, s_aux=None):
    """Token by token in float64: appends, then attends. Writes the pages of `arguments`."""
    q, k, v, k_cache, v_cache, starts, past, table = arguments
    out = torch.zeros_like(q, dtype=torch.float64)
    for row, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        for i in range(first, end):
            at = int(past[row]) + i - first
            slots = [t % wrap if wrap else t for t in range(0 if left < 0 else max(0, at - left), at + 1)]
            slots = [(int(table[row, slot // PAGE]), slot % PAGE) for slot in slots]
            k_cache[slots[-1]], v_cache[slots[-1]] = k[i], v[i]
            keys, values = (
                torch.stack([cache[slot] for slot in slots]).double().repeat_interleave(GROUP, 1)
                for cache in (k_cache, v_cache)
            )
            scores = torch.einsum("hd,nhd->hn", q[i].double(), keys) * softmax_scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if s_aux is not None:
                scores = torch.cat([scores, s_aux.double()[:, None]], 1)
            out[i] = torch.einsum("hn,nhd->hd", scores.softmax(1)[:, : len(slots)], values)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({}, {}),
        ({}, dict(left=6)),
        (RING, dict(wrap=10, left=9)),
        ({}, dict(softmax_scale=0.3, softcap=5.0)),
        ({}, dict(s_aux=torch.linspace(-1, 1, HEADS * GROUP))),
        (SHARED, dict(s_aux=torch.linspace(-1, 1, HEADS * GROUP))),
        (SHARED, dict(left=6)),
    ],
)
def test_attention_and_pages(dtype, shapes, options):
    arguments = make(dtype, **shapes)
    copies = [x.clone() for x in arguments]
    out = ragged.attend_ragged(*arguments, **options)
    reference = expected(copies, **options)
    assert_close(out, reference, **(FLOAT32 if dtype == torch.float32 else BFLOAT16))
    assert not out[-PADDING:].any()
    assert all(torch.equal(x, y) for x, y in zip(arguments, copies))  # the pages hold what was appended


def test_token_trees():
    """Each sequence's new tokens as a tree of its own, against the attention of that sequence alone."""
    new, past = [1, 6, 0, 4, 4], [3, 13, 5, 8, 9]
    arguments = make(new=new, past=past)
    q, k, v, k_cache, v_cache, starts, lengths, table = arguments
    caches = [x.clone() for x in (k_cache, v_cache)]
    tree = torch.zeros(len(q), dtype=torch.int64)
    out = torch.zeros_like(q)
    for row, (first, count) in enumerate(zip(starts.tolist(), new)):
        if count:
            seen = [1]
            for node in range(1, count):  # every node follows one of those before it
                seen.append(seen[(7 * node) % node // 2] | 1 << node)
            part = slice(first, first + count)
            tree[part] = torch.tensor(seen)
            out[part] = api.flash_attn_with_kvcache(
                q[None, part], *caches, k=k[None, part], v=v[None, part], cache_seqlens=lengths[row : row + 1],
                block_table=table[row : row + 1], causal=True, tree_mask=tree[None, part],
            )[0]  # fmt: skip
    assert torch.equal(ragged.attend_ragged(*arguments, tree_mask=tree), out)
    assert all(torch.equal(*pair) for pair in zip((k_cache, v_cache), caches))
    with pytest.raises(RuntimeError, match="attend_ragged"):
        ragged.attend_ragged(*arguments, tree_mask=tree[:-1])
    arguments = make(new=[1, 65], past=[3, 4])
    with pytest.raises(ValueError, match="tree_mask with 65 new tokens"):
        ragged.attend_ragged(*arguments, tree_mask=torch.ones(len(arguments[0]), dtype=torch.int64))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("shapes", "options"), [({}, {}), (RING, dict(wrap=10, left=9)), (SHARED, {})])
def test_pages_that_do_not_lie_end_to_end(kind, shapes, options):
    """Codes and scales of a page stand together, as in transformers' pool: the same bits as in tensors of their own,
    and nothing is written between them."""
    arguments = make(torch.bfloat16, **shapes)
    blocks, codes, scales = len(arguments[3]), PAGE * HEADS * DIM, PAGE * HEADS * 2  # bytes
    pool = torch.full((blocks, 2 * (codes + scales) + 6), 77, dtype=torch.uint8)
    pages, factors = [], []
    for start, x in zip((2, codes + scales + 4), arguments[3:5]):
        pages.append(pool[:, start : start + codes].view(kind).view(x.shape))
        factors.append(pool[:, start + codes : start + codes + scales].view(torch.float16).view(x.shape[:3]))
        pages[-1].copy_((x * 20).to(kind))
        factors[-1].fill_(0.05)
    assert ragged.serves(torch.bfloat16, HEADS * GROUP, *pages, *factors)
    whole = [x.contiguous() for x in pages + factors]
    results = []
    for own in (whole, pages + factors):
        arguments[3:5] = own[:2]
        results.append(ragged.attend_ragged(*arguments, k_scale=own[2], v_scale=own[3], **options))
    assert torch.equal(*results) and results[0].any()
    for x, y in zip(pages + factors, whole):
        assert torch.equal(x.contiguous().view(torch.uint8), y.view(torch.uint8))
    between = torch.ones(pool.shape[1], dtype=torch.bool)
    for start in (2, codes + scales + 4):
        between[start : start + codes + scales] = False
    assert (pool[:, between] == 77).all()


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_pages_and_rings(bits, dtype):
    """int4 and int2 pages that stand side by side in one pool, and rings in another order than the sequences: what each
    sequence gets alone from pages and a ring of its own. A prompt of more than 64 tokens fits its ring."""
    generator, size, slots, dim = torch.Generator().manual_seed(1), 8, 160, 32
    new, past, done = [1, 1, 90, 3, 1], [200, 20, 61, 0, 145], [48, 0, 8, 0, 16]
    q, k, v = (
        torch.randn(sum(new), heads, dim, generator=generator).to(dtype) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    blocks, packed, groups = 40, dim * bits // 8, 2
    codes = size * HEADS * packed
    pool = torch.randint(0, 256, (blocks, 2 * codes + 2 * HEADS * (2 * dim + 2 * size * groups)), generator=generator)
    pool = pool.to(torch.uint8)
    shapes = [(1, HEADS, dim)] * 2 + [(size, HEADS, groups)] * 2
    pages = [pool[:, at : at + codes].view(blocks, size, HEADS, packed) for at in (0, codes)]
    at, scales = 2 * codes, []
    for shape in shapes:
        count = 2 * torch.Size(shape).numel()
        scales.append(pool[:, at : at + count].view(torch.float16).view(blocks, *shape))
        scales[-1].copy_(torch.rand(scales[-1].shape, generator=generator) - (0.5 if len(scales) % 2 == 0 else 0))
        at += count
    names = "k_scale", "k_min", "v_scale", "v_min"
    tails = [torch.randn(7, slots, HEADS, dim, generator=generator).to(dtype) for _ in range(2)]
    rows = torch.tensor([6, 2, 0, 5, 3], dtype=torch.int32)
    quantized = torch.zeros(7, dtype=torch.int32)
    quantized[rows.long()] = torch.tensor(done, dtype=torch.int32)
    table = torch.randperm(blocks, generator=generator)[: len(new) * 6].int().view(len(new), 6)
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    whole = dict(zip(names, (x.contiguous() for x in scales)))
    expected = []
    for i, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
        ring = [tail[rows[i : i + 1].long()].clone() for tail in tails]
        for x, own in ((k, ring[0]), (v, ring[1])):
            own[0, torch.arange(past[i], past[i] + new[i]) % slots] = x[first:end]
        for part in range(first, end):
            length = past[i] + part - first + 1
            expected.append(
                api.flash_attn_with_kvcache(
                    q[None, part : part + 1], pages[0].contiguous(), pages[1].contiguous(), None, None,
                    torch.tensor([length], dtype=torch.int32), table[i : i + 1], k_tail=ring[0], v_tail=ring[1],
                    quantized_seqlens=torch.tensor([done[i]], dtype=torch.int32), causal=True, **whole,
                )[0]
            )  # fmt: skip
    order = names[0], names[2], names[1], names[3]
    given = dict(zip(names, scales))
    assert ragged.serves(dtype, HEADS * GROUP, *pages, **{name: given[name] for name in order})
    out = ragged.attend_ragged(
        q, k, v, *pages, starts, torch.tensor(past, dtype=torch.int32), table, **given, k_tail=tails[0],
        v_tail=tails[1], quantized_seqlens=quantized, ring_rows=rows,
    )  # fmt: skip
    assert_close(out, torch.cat(expected), **(FLOAT32 if dtype == torch.float32 else BFLOAT16))


def test_a_replay_reads_other_lengths():
    """The same capture serves any sequences of as many rows."""
    arguments = make(new=[3, 1, 1], past=[0, 4, 6])
    others = make(new=[1, 2, 0], past=[5, 3, 1])
    table = torch.cat([arguments[-1], torch.zeros(3, 9, dtype=torch.int32)], 1)
    arguments[-1] = table
    capture = Capture(lambda: ragged.attend_ragged(*arguments, left=3))
    for to, x in zip(arguments[3:], others[3:]):
        to.view(-1)[: x.numel()] = x.flatten() if to is not table else 0
    table[:, : others[-1].shape[1]] = others[-1]
    out = capture.replay()
    count = 3
    arguments[:3] = [x[: count + PADDING] for x in arguments[:3]]
    assert_close(out[:count], expected(arguments, left=3)[:count], **FLOAT32)


@pytest.mark.parametrize(
    "change",
    [
        dict(new=[3], past=[8], wrap=10),  # several tokens, of which the last overwrites what the first sees
        dict(past=[12, 13, 3, 7, 9, 2, 3000]),
        dict(starts=[0, 1, 2, 7, 7, 77, 80, 900]),
        dict(block=10**6),
    ],
)
def test_what_does_not_fit_is_refused(change):
    """Nothing is written then."""
    wrap = change.get("wrap", 0)
    arguments = make(**{key: value for key, value in change.items() if key in ("new", "wrap")})
    if "past" in change:
        arguments[6] = torch.tensor(change["past"], dtype=torch.int32)
    if "starts" in change:
        arguments[5] = torch.tensor(change["starts"], dtype=torch.int32)
    arguments[7][0, 0] = change.get("block", arguments[7][0, 0])
    before = [x.clone() for x in arguments]
    with pytest.raises(RuntimeError, match="lengths beyond the pages"):
        ragged.attend_ragged(*arguments, wrap=wrap, left=9 if wrap else -1)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before))
