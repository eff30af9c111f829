"""The prefill kernels against float64 where sequences are longer than a tile of queries and a block of keys: blocks at
the edges and between them, pages smaller and larger than a block, and the order of programs."""

import pytest
import torch
from paged_caches import assert_agree, cumulative, filled_cache, random

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import forward, forward_launch, interface, tiles


pytestmark = pytest.mark.usefixtures("nan_poison")

TOLERANCE = {
    torch.float32: (2e-6, 1e-5, "float32 against float64: products and sums are rounded"),
    torch.float16: (1e-3, 4e-3, "float16: weights and output are rounded"),
    torch.bfloat16: (8e-3, 3e-2, "bfloat16: weights and output are rounded (truncated by the interpreter)"),
}
LSE = (2e-6, 1e-5, "log-sum-exp of exact products: float32 against float64")

# shared [Hq] slopes, slopes of each row [B, Hq]; windows narrower and wider than a block of 64 keys and a tile of 128
# queries
OPTIONS = {
    "full": {},
    "causal": {"causal": True, "s_aux": True},
    "narrow_window": {"causal": True, "window_size": (30, 0), "alibi_slopes": 1},
    "wide_window": {"window_size": (200, 10), "softcap": 2.0},
    "alibi": {"alibi_slopes": 1},
    "alibi_per_row": {"causal": True, "alibi_slopes": 2, "window_size": (210, 0)},
    "everything": {"causal": True, "window_size": (150, 0), "softcap": 3.0, "s_aux": True, "alibi_slopes": 2},
}


def options(name, heads, rows, device):
    """The options of that name with real sinks and slopes."""
    chosen = dict(OPTIONS[name])
    if "s_aux" in chosen:
        chosen["s_aux"] = torch.linspace(-2, 6, heads, device=device)
    if "alibi_slopes" in chosen:
        slopes = torch.linspace(0.02, 0.5, heads, device=device)
        per_row = torch.linspace(1, 0.1, rows, device=device)[:, None] * slopes
        chosen["alibi_slopes"] = slopes if chosen["alibi_slopes"] == 1 else per_row
    return chosen


def check(actual, expected):
    assert_agree(actual, expected, TOLERANCE[actual[0].dtype], LSE)


LENGTHS = [(300, 300), (140, 320), (260, 100)]


@pytest.mark.parametrize(  # all but one
    "queries, keys, name", [(*LENGTHS[(i + j) % 3], name) for i, name in enumerate(OPTIONS) for j in range(2)]
)
def test_blocks_at_and_between_the_edges(kernel_device, queries, keys, name):
    made = {"dtype": torch.float16, "device": kernel_device}
    q, k, v = random(1, queries, 2, 16, **made), random(1, keys, 1, 16, **made), random(1, keys, 1, 32, **made)
    chosen = {**options(name, 2, 1, kernel_device), "return_attn_probs": True}
    expected = fp.flash_attn_func_reference(q.double(), k, v, **chosen)
    check(fp.flash_attn_func(q, k, v, **chosen), expected)


@pytest.mark.parametrize(
    "dim, value_dim, dtype",
    [*((*dims, torch.float32) for dims in ((80, 96), (192, 128), (48, 144))), (80, 96, torch.bfloat16)],
)
def test_head_dims_in_two_parts(kernel_device, dim, value_dim, dtype):
    made = {"dtype": dtype, "device": kernel_device}
    q, k = random(1, 140, 1, dim, **made), random(1, 70, 1, dim, **made)
    v = random(1, 70, 1, value_dim, **made)
    chosen = {"causal": True, "return_attn_probs": True}
    check(fp.flash_attn_func(q, k, v, **chosen), fp.flash_attn_func_reference(q.double(), k, v, **chosen))


def test_split_dim_covers_every_head_dim():
    for dim in range(1, 257):
        whole, rest = tiles.split_dim(dim)
        assert dim <= whole + rest < 2 * max(dim, 8) + 16 and (rest == 0 or 16 <= rest < whole < dim)
        assert all(part & (part - 1) == 0 for part in (whole, rest))
    expected = {64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 192: (128, 64)}
    assert {dim: tiles.split_dim(dim) for dim in expected} == expected


LENGTHS_Q, LENGTHS_K = (0, 1, 64, 150, 7, 129), (5, 1, 64, 256, 0, 131)


@pytest.mark.parametrize("name", ["full", "causal", "alibi_per_row", "everything"])
def test_varlen(kernel_device, name):
    """Without queries, without keys, one token, exactly a block, exactly four, and odd ones."""
    made = {"dtype": torch.float16, "device": kernel_device}
    q = random(sum(LENGTHS_Q), 2, 16, **made)
    k, v = random(sum(LENGTHS_K), 1, 16, **made), random(sum(LENGTHS_K), 1, 16, **made)
    lengths = cumulative(LENGTHS_Q, kernel_device), cumulative(LENGTHS_K, kernel_device), 150, 256
    chosen = {**options(name, 2, len(LENGTHS_Q), kernel_device), "return_attn_probs": True}
    expected = fp.flash_attn_varlen_func_reference(q.double(), k, v, *lengths, **chosen)
    check(fp.flash_attn_varlen_func(q, k, v, *lengths, **chosen), expected)


@pytest.mark.parametrize(
    "name, page", [*(("causal", page) for page in (16, 64, 256)), *(("alibi_per_row", page) for page in (16, 48, 128))]
)
def test_chunks_over_pages(kernel_device, name, page):
    """One chunk of each prompt against its pages: the first chunk, one that ends at a page, one that begins there, odd
    ones; NaN wherever no token lies."""
    queries, keys = (130, 64, 64, 31, 1), (130, 256, 320, 97, 257)
    (k, v, table), _ = filled_cache("full", keys, page, 1, 16, 32, kernel_device)
    q = random(sum(queries), 2, 16, dtype=torch.float16, device=kernel_device)
    lengths = cumulative(queries, kernel_device), cumulative(keys, kernel_device), 130, 320
    chosen = {**options(name, 2, len(keys), kernel_device), "block_table": table, "return_attn_probs": True}
    expected = fp.flash_attn_varlen_func_reference(q.double(), k, v, *lengths, **chosen)
    check(fp.flash_attn_varlen_func(q, k, v, *lengths, **chosen), expected)


@pytest.mark.parametrize("heads_that_fit", [0, 2, 100])
def test_order_of_programs(kernel_device, monkeypatch, heads_that_fit):
    """Whatever fits the L2 cache, every tile is computed once; here also with a last section that is smaller."""
    made = {"dtype": torch.float16, "device": kernel_device}
    q, k, v = random(1, 270, 6, 16, **made), random(1, 270, 3, 16, **made), random(1, 270, 3, 16, **made)
    monkeypatch.setattr(forward_launch, "_L2_BYTES", heads_that_fit * 270 * 32 * 2)
    assert forward_launch.pairs_a_section(q, k, v, 1, 270) == {0: 2, 2: 4, 100: 6}[heads_that_fit]
    chosen = {"causal": True, "return_attn_probs": True}
    check(fp.flash_attn_func(q, k, v, **chosen), fp.flash_attn_func_reference(q.double(), k, v, **chosen))


@pytest.mark.parametrize("lengths", [(400, *[1] * 9), (1, 0, 0, 300, *[0] * 7, 3), (0, 0, 1, *[0] * 140, 70)])
def test_programs_of_a_mixed_batch_search_their_tile(kernel_device, monkeypatch, lengths):
    """One long sequence among short and empty ones: as many programs as there can be tiles, and each tile once."""
    made, grids = {"dtype": torch.float16, "device": kernel_device}, []
    monkeypatch.setattr(forward, "forward_kernel", Noted(forward.forward_kernel, grids))
    total, block = sum(lengths), forward.forward_config(torch.float16, 16, max(lengths), 0, "sm_80").block_m
    q, k, v = random(total, 4, 16, **made), random(total, 2, 16, **made), random(total, 2, 16, **made)
    bounds = cumulative(lengths, kernel_device)
    arguments = (bounds, bounds, max(lengths), max(lengths))
    chosen = {"causal": True, "return_attn_probs": True}
    expected = fp.flash_attn_varlen_func_reference(q.double(), k, v, *arguments, **chosen)
    check(fp.flash_attn_varlen_func(q, k, v, *arguments, **chosen), expected)
    needed = sum(-(-length // block) for length in lengths)
    ((programs, options),) = grids
    assert options["SEARCH"] and 4 * needed <= programs < 4 * len(lengths) * -(-max(lengths) // block) / 2


@pytest.mark.parametrize("name", ["causal", "everything"])
def test_few_queries_beside_a_prompt_are_decoded(kernel_device, monkeypatch, name):
    """Over pages: heads that share keys compute short sequences together, their keys are split; the prompt's tiles are
    computed by themselves."""
    grids, seen = [], []
    monkeypatch.setattr(forward, "forward_kernel", Noted(forward.forward_kernel, grids))
    decode = interface.attend_few
    monkeypatch.setattr(interface, "attend_few", lambda *a, **b: seen.append(b["max_seqlen_q"]) or decode(*a, **b))
    queries, keys = (1, 300, 0, 4, *[1] * 7, 5), (140, 310, 7, 4, *range(1, 8), 33)
    (k, v, table), _ = filled_cache("full", keys, 16, 2, 16, 32, kernel_device)
    q = random(sum(queries) + 2, 8, 16, dtype=torch.float16, device=kernel_device)  # two tokens of nobody
    lengths = cumulative(queries, kernel_device), cumulative(keys, kernel_device), 300, 310
    chosen = {**options(name, 8, len(keys), kernel_device), "block_table": table, "return_attn_probs": True}
    expected = fp.flash_attn_varlen_func_reference(q.double(), k, v, *lengths, **chosen)
    found, real = fp.flash_attn_varlen_func(q, k, v, *lengths, **chosen), sum(queries)
    check((found[0][:real], found[1][:, :real], None), (expected[0][:real], expected[1][:, :real], None))
    ((programs, constants),) = grids
    assert seen == [4] and constants["SEARCH"] and programs < 8 * len(queries) * 3


class Noted:
    """A kernel whose grids and options are noted."""

    def __init__(self, kernel, grids):
        self.kernel, self.grids = kernel, grids

    def __getitem__(self, grid):
        def run(*args, **options):
            self.grids.append((grid[0], options))
            self.kernel[grid](*args, **options)

        return run


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_native_sizes(kernel_device, dim, causal):
    """Sizes where loads are pipelined and programs race: too slow to interpret."""
    made = {"dtype": torch.bfloat16, "device": kernel_device}
    q, k, v = random(2, 2100, 8, dim, **made), random(2, 2100, 2, dim, **made), random(2, 2100, 2, dim, **made)
    chosen = {"softmax_scale": 0.2, "causal": causal, "return_attn_probs": True}
    check(fp.flash_attn_func(q, k, v, **chosen), fp.flash_attn_func_reference(q.double(), k, v, **chosen))
