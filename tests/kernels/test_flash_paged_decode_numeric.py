"""The decode kernels against float64, natively on CUDA or interpreted (see tests/aot.py): how keys are shared out and
put together again, token trees, and every cache format. Options and paths one by one:
test_flash_paged_options_numeric.py."""

import pytest
import torch
import triton
import triton.language as tl
from helpers import assert_close
from paged_caches import CACHES, assert_agree, filled_cache

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import code_operands, config, decode, decode_combine, decode_schedule


pytestmark = pytest.mark.usefixtures("nan_poison")

TOLERANCE = {
    torch.float32: (2e-6, 1e-5, "float32 against float64: products and sums are rounded"),
    torch.float16: (1e-3, 4e-3, "float16: weights and output are rounded"),
    torch.bfloat16: (8e-3, 3e-2, "bfloat16: weights and output are rounded"),
}
SMALL_GROUPS = {"group": 16, "ring": 32}  # as small as a key tile: the kernel's path of real caches
RAGGED = (170, 1, -1, 16, 0, 11)  # 10 times longer than the others, one token, padding, the end of a page, empty


def check(actual, expected):
    assert_agree(actual, expected, TOLERANCE[actual[0].dtype])


def case(device, name="full", lengths=RAGGED, queries=1, heads=4, kv_heads=2, dim=32, block_size=16, **rest):
    """q, the caches and other arguments of `flash_attn_with_kvcache`."""
    layout = {"dtype": torch.float32, **CACHES[name], **rest}
    (k, v, table), arguments = filled_cache(name, lengths, block_size, kv_heads, dim, dim, device, **layout)
    q = torch.randn(len(lengths), queries, heads, dim, device=device).to(layout["dtype"])
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return (q, k, v), {**arguments, "cache_seqlens": lengths, "block_table": table, "return_softmax_lse": True}


def check_case(tensors, arguments):
    q, k, v = tensors
    expected = fp.flash_attn_with_kvcache_reference(q.double(), k, v, **arguments)
    actual = fp.flash_attn_with_kvcache(q, k, v, **arguments)
    check(actual, expected)
    return actual


@pytest.fixture
def two_processors(monkeypatch):
    """Few programs, each with several rows or a part of one, and quick to interpret."""
    monkeypatch.setattr(decode, "processors", lambda device: 2)


@triton.jit
def shares_kernel(
    seqlens,
    taken,
    firsts,
    rows,
    lanes,
    seqlen_k,
    left,
    HAS_LEFT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """taken int32 [rows, lanes, tiles]: how often the decode kernels visit a key tile; firsts: programs that begin a
    lane."""
    share, position, stop, first_lane, end_lane, row_start = decode_schedule.program_share(
        rows, lanes, seqlens, 1, seqlen_k, 0, left, HAS_LEFT, False, BLOCK_N, BLOCK_B
    )
    for lane in tl.range(first_lane, end_lane):
        length, begin, lane_tiles = decode_schedule.sequence_tiles(
            lane // lanes, rows, seqlens, 1, seqlen_k, 0, left, HAS_LEFT, False, BLOCK_N
        )
        lane_start = row_start + lane % lanes * lane_tiles
        first = tl.maximum(position - lane_start, 0)
        last = tl.minimum(stop - lane_start, lane_tiles)
        for tile in tl.range(begin + first, begin + last):
            tl.atomic_add(taken + lane * (seqlen_k // BLOCK_N) + tile, 1)
        if first == 0:
            tl.atomic_add(firsts + lane, 1)
        row_start += tl.where(lane % lanes == lanes - 1, lanes * lane_tiles, 0)


@pytest.mark.parametrize("programs, left", [(1, -1), (7, 40), (20, -1), (20, 40)])
def test_every_tile_is_taken_once(kernel_device, programs, left):
    """Also with more rows than are looked at at once."""
    rows, lanes, block = 40, 3, 16
    generator = torch.Generator().manual_seed(programs)
    lengths = torch.randint(-1, 40, (rows,), generator=generator, dtype=torch.int32)
    lengths[::9] *= 10
    capacity = 400
    taken = torch.zeros(rows, lanes, capacity // block, dtype=torch.int32, device=kernel_device)
    firsts = torch.zeros(rows, lanes, dtype=torch.int32, device=kernel_device)
    shares_kernel[(programs,)](
        lengths.to(kernel_device),
        taken,
        firsts,
        rows,
        lanes,
        capacity,
        left,
        HAS_LEFT=left >= 0,
        BLOCK_N=block,
        BLOCK_B=32,
    )
    tile = torch.arange(capacity // block)
    begin = (lengths - 1 - left).clamp(min=0) // block if left >= 0 else torch.zeros(rows, dtype=torch.int32)
    end = torch.maximum(-(-lengths.clamp(min=0) // block), begin + 1)
    expected = (tile >= begin[:, None]) & (tile < end[:, None])
    assert torch.equal(taken.cpu(), expected[:, None].expand(-1, lanes, -1).int())
    assert firsts.eq(1).all(), "every lane, also of a row without keys, has one program that begins it"


@pytest.mark.parametrize("name", ["full", "int4"])
def test_any_number_of_programs(kernel_device, monkeypatch, name):
    """One program for all lanes, parts of lanes, and as many programs as the keys allow: the same result."""
    tensors, arguments = case(kernel_device, name, queries=2, **(SMALL_GROUPS if name == "int4" else {}))
    arguments.update(causal=True, s_aux=torch.tensor([1.0, -float("inf"), 4.0, 0.0], device=kernel_device))
    monkeypatch.setattr(config.Config, "programs_per_processor", 1)
    for processors in (1, 20):
        monkeypatch.setattr(decode, "processors", lambda device, count=processors: count)
        out, lse = check_case(tensors, arguments)
        assert out[2].eq(0).all() and out[4].eq(0).all(), "rows without keys give 0"


@pytest.mark.parametrize(
    "name, block_size, dim",
    [("full", 48, 80), ("full", 256, 32), ("int8", 48, 80), ("fp8", 256, 32), ("int4", 256, 32), ("int2", 48, 80)],
)
@pytest.mark.usefixtures("two_processors")
def test_formats(kernel_device, name, block_size, dim):
    """Pages smaller, larger and no multiple of a key tile; float16 queries, so that codes go through float16 bits."""
    groups = {**SMALL_GROUPS, "channel_groups": 2 if dim == 32 else 1} if name == "int4" else {}
    check_case(*case(kernel_device, name, (150, -1, 256), 3, 3, 1, dim, block_size, dtype=torch.float16, **groups))


@pytest.mark.parametrize(
    "name, block_size, group, heads, channel_groups",
    [
        ("int4", 64, 64, (8, 2), 1),
        ("int2", 32, 32, (4, 1), 1),
        ("int4", 96, 32, (4, 1), 1),
        ("int4", 32, 32, (4, 1), 4),
    ],
)
@pytest.mark.usefixtures("two_processors")
def test_groups_of_whole_warps(kernel_device, name, block_size, group, heads, channel_groups):
    """Groups that leave each warp 32 keys, in pages larger and smaller than a tile."""
    layout = {"group": group, "ring": 2 * group, "dtype": torch.float16, "channel_groups": channel_groups}
    check_case(*case(kernel_device, name, (290, 1, -1, 96, 0, 130), 1, *heads, 64, block_size, **layout))


@pytest.mark.parametrize(
    "name, block_size, warps, values_ahead, move",
    [
        *(("int8", 64, 1, False, False), ("int8", 64, 2, True, True), ("fp8", 16, 2, False, True)),
        *(("int4", 64, 2, False, True), ("int4", 64, 2, True, True), ("int2", 32, 1, False, False)),
        *(("int2", 32, 2, True, True),),
    ],
)
@pytest.mark.usefixtures("two_processors")
def test_ways_to_load(kernel_device, monkeypatch, name, block_size, warps, values_ahead, move):
    """What is loaded ahead, and how weights change lanes, changes nothing."""
    tile = config.CodesConfig(8, warps, 16 if block_size == 16 else 32, 255, values_ahead, move)
    monkeypatch.setattr(decode, "codes_config", lambda *arguments: tile)
    groups = {"group": 32, "ring": 64} if name == "int4" else {}
    check_case(*case(kernel_device, name, (150, 1, -1, 96), 1, 4, 1, 64, block_size, dtype=torch.float16, **groups))


@triton.jit
def operands_kernel(
    codes, of_keys, of_values, magic, DTYPE: tl.constexpr, IS_FLOAT: tl.constexpr, BITS: tl.constexpr,
    BYTES: tl.constexpr, KEYS: tl.constexpr, PTX: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    """codes [2 KEYS, BYTES], as words -> what both operands hold, [2 KEYS, channels] each. Values have no offset: their
    sums run over all keys, and tensor cores cut off what they add to them."""
    CHANNELS: tl.constexpr = BYTES * 8 // BITS
    number = (tl.arange(0, 2) * KEYS)[:, None] + tl.arange(0, KEYS)[None, :]
    index = tl.arange(0, CHANNELS)
    first, key, word = code_operands.key_words(2, KEYS, BYTES)
    words = tl.load(codes + (first + key) * (BYTES // 4) + word)
    keys = code_operands.key_operand(words, magic, 2, KEYS, BYTES, BITS, IS_FLOAT, DTYPE, PTX).to(tl.float32)
    offset = code_operands.offset_of(BITS, IS_FLOAT, DTYPE)
    factor = code_operands.factor_of(index, BYTES, BITS, IS_FLOAT, DTYPE)
    channel = code_operands.channel_of_column(index, BYTES, BYTES, 0)
    tl.store(of_keys + number[:, :, None] * CHANNELS + channel[None, None, :], (keys - offset) * factor[None, None, :])
    first, key, word = code_operands.value_words(2, KEYS, BYTES, MOVE)
    even = tl.load(codes + (first + key) * (BYTES // 4) + word)
    odd = tl.load(codes + (first + key + 1) * (BYTES // 4) + word)
    values = code_operands.value_operand(even, odd, magic, 2, KEYS, BYTES, BITS, IS_FLOAT, DTYPE, PTX).to(tl.float32)
    channel = code_operands.channel_of_row(index, BYTES, BYTES, 0)
    names = tl.broadcast_to(tl.arange(0, KEYS)[None, :, None], (2, KEYS, 8)).to(DTYPE)
    names = code_operands.operand_of_weights(names, 2, KEYS, 8, MOVE, PTX).to(tl.int32)
    number = (tl.arange(0, 2) * KEYS)[:, None] + tl.max(names, 2)  # as the weights of keys are ordered
    tl.store(of_values + number[:, None, :] * CHANNELS + channel[None, :, None], values * factor[None, :, None])


@pytest.mark.parametrize("is_float, bits", [(False, 8), (True, 8), (False, 4), (False, 2)])
@pytest.mark.parametrize(
    "dtype, keys, move", [(tl.float16, 16, False), (tl.float16, 32, True), (tl.float32, 32, False)], ids=str
)
def test_every_byte_becomes_its_numbers(kernel_device, is_float, bits, dtype, keys, move):
    """And stands where its key and channel are expected."""
    size = 32 if bits == 2 else 64
    codes = torch.arange(2 * keys * size, device=kernel_device).mul(37).to(torch.uint8).view(2 * keys, size)
    assert len(codes.unique()) == 256
    results = [torch.full((2 * keys, size * 8 // bits), float("nan"), device=kernel_device) for _ in range(2)]
    ptx = kernel_device == "cuda" and torch.version.hip is None
    arguments = (codes.view(torch.int32), *results, code_operands.MAGIC, dtype, is_float, bits, size, keys, ptx, move)
    operands_kernel[(1,)](*arguments, num_warps=2)
    if bits == 8:
        expected = codes.view(torch.float8_e4m3fn if is_float else torch.int8).float()
    else:
        fields = [(codes.int() >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        expected = torch.cat(fields, 1).float()
    known = ~expected.isnan()
    for result in results:
        assert torch.equal(result[known], expected[known])


def random_tree(rows, nodes, device):
    """Masks of random trees: bit j of mask i says that node j is an ancestor of node i, or node i."""
    masks = torch.zeros(rows, nodes, dtype=torch.int64)
    for row in range(rows):
        for node in range(nodes):
            parent = int(torch.randint(-1, node, ())) if node else -1
            masks[row, node] = (masks[row, parent] if parent >= 0 else 0) | torch.tensor(1).bitwise_left_shift(node)
    return masks.to(device)


ALL = {"window_size": (10, -1), "alibi_slopes": 1.0, "softcap": 5.0}


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_a_token_with_most_of_the_weight_and_no_value(kernel_device, name):
    """An attention sink: the others' weights of 1e-5 times scales of 1e-3 are all of the result."""
    layout = {"group": 32, "ring": 64} if name == "int4" else {}
    (q, k, v), arguments = case(
        kernel_device, name, (300,), heads=2, kv_heads=1, dim=64, block_size=32, dtype=torch.float16, **layout
    )
    first = arguments["block_table"][0, 0].item()
    for which in ("v_scale", "v_min", "v_tail"):
        if which in arguments:
            arguments[which] *= 0.1
            if which != "v_tail":
                arguments[which][first, 0] = 0.0
    scales = {which: tensor for which, tensor in arguments.items() if which in ("k_scale", "v_scale", "k_min", "v_min")}
    starts = torch.tensor([0, 1], dtype=torch.int32, device=kernel_device)
    sink = fp.gather_cache_reference(k, v, arguments["block_table"], starts, torch.float32, **scales)[0]
    q = (sink * (88 / sink.square().sum())).expand(1, 2, 64)[:, None].half()  # a score of 88 / 8
    expected = fp.flash_attn_with_kvcache_reference(q.double(), k, v, **arguments)[0]
    actual = fp.flash_attn_with_kvcache(q, k, v, **arguments)[0]
    largest = expected.abs().max().item()
    assert largest < 0.01
    assert_close(actual.float(), expected.float(), 1e-3, 2e-3 * largest, "small numbers lose no more bits than others")


@pytest.mark.parametrize(
    "nodes, name, extra", [(6, "full", {}), (6, "int4", ALL), (64, "full", ALL), (64, "int4", {})], ids=str
)
@pytest.mark.usefixtures("two_processors")
def test_token_trees(kernel_device, extra, name, nodes):
    """Lengths include the nodes; one row has fewer keys than nodes, one is padding."""
    lengths = (nodes, 40 + nodes, -1, nodes - 3)
    groups = SMALL_GROUPS | {"ring": 128} if name == "int4" else {}
    tensors, arguments = case(kernel_device, name, lengths, nodes, 2, 1, 16, **groups)
    tree = random_tree(len(lengths), nodes, kernel_device)
    tree[1, nodes // 2] = 0  # a padding node sees no node
    if "alibi_slopes" in extra:
        extra = {**extra, "alibi_slopes": torch.tensor([0.1, 0.4], device=kernel_device)}
    check_case(tensors, {**arguments, "tree_mask": tree, "causal": True, **extra})


@pytest.mark.usefixtures("two_processors")
def test_71_heads_of_one_key_head(kernel_device):
    tensors, arguments = case(kernel_device, lengths=(70, 5), queries=2, heads=71, kv_heads=1, dim=16)
    check_case(tensors, {**arguments, "causal": True})


@pytest.mark.parametrize("name", ["full", "int8", "int4"])
@pytest.mark.usefixtures("two_processors")
def test_evicted_pages_are_not_touched(kernel_device, name):
    """Streaming: the first pages and a window stay, pages between are given back and poisoned by others."""
    lengths = (200, 140)
    tensors, arguments = case(kernel_device, name, lengths, block_size=16, **(SMALL_GROUPS if name == "int4" else {}))
    evicted = arguments["block_table"][:, 2:7].long().flatten()
    for tensor in (*tensors[1:], *(arguments[s] for s in ("k_scale", "v_scale", "k_min", "v_min") if s in arguments)):
        if tensor.dtype.is_floating_point:
            tensor[evicted] = float("nan")
        else:
            tensor[evicted] = 127
    arguments["block_table"][:, 2:7] = -1
    check_case(tensors, {**arguments, "causal": True, "window_size": (130, -1)})
    check_case(tensors, {**arguments, "causal": True})


@pytest.mark.usefixtures("two_processors")
@pytest.mark.parametrize("bits", [4, 2])
def test_a_pool_without_pages(kernel_device, bits):
    """All tokens lie in the ring; nothing is read from pages that are not there."""
    made = dict(device=kernel_device)
    codes = torch.empty(0, 32, 1, 64 * bits // 8, dtype=torch.uint8, **made)
    by_channel, by_token = (torch.empty(0, *shape, dtype=torch.float16, **made) for shape in ((1, 1, 64), (32, 1, 1)))
    tails = [torch.randn(1, 32, 1, 64, device=kernel_device).half() for _ in range(2)]
    q, lengths = torch.randn(1, 1, 2, 64, device=kernel_device).half(), torch.tensor([9], dtype=torch.int32, **made)
    arguments = dict(k_scale=by_channel, k_min=by_channel, v_scale=by_token, v_min=by_token)
    arguments |= dict(k_tail=tails[0], v_tail=tails[1], quantized_seqlens=lengths * 0, cache_seqlens=lengths)
    arguments |= dict(block_table=torch.full((1, 1), -1, dtype=torch.int32, **made), causal=True)
    actual = fp.flash_attn_with_kvcache(q, codes, codes, **arguments)
    weights = (q[0, 0].float() @ tails[0][0, :9, 0].float().T / 8).softmax(-1)
    torch.testing.assert_close(actual[0, 0].float(), weights @ tails[1][0, :9, 0].float(), rtol=2e-3, atol=2e-3)


def test_contiguous_cache(kernel_device):
    q = torch.randn(3, 2, 4, 16, device=kernel_device)
    k, v = torch.randn(2, 3, 140, 2, 24, device=kernel_device).unbind(0)
    lengths = torch.tensor([140, 0, 77], dtype=torch.int32, device=kernel_device)
    arguments = dict(cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    check_case((q, k[..., :16], v), arguments)


def test_unserved_layouts_raise(kernel_device):
    tensors, arguments = case(kernel_device, "int4", (5,), block_size=32, **SMALL_GROUPS)
    arguments["k_min"] = arguments["k_min"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_min has strides"):
        fp.flash_attn_with_kvcache(*tensors, **arguments)


def test_too_much_work_raises(kernel_device):
    """Positions in the sequence of all key tiles are int32."""
    q, cache = torch.zeros(1024, 1, 1, 16, device=kernel_device), torch.zeros(1, 16, 1, 16, device=kernel_device)
    lengths = torch.zeros(1024, dtype=torch.int32, device=kernel_device)
    table = torch.zeros(1, 2**23, dtype=torch.int32, device=kernel_device).expand(1024, -1)
    with pytest.raises(ValueError, match="fewer columns"):
        fp.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table)


NATIVE = {"full": {}, "int8": {}, "fp8": {}, "int4": {"group": 64, "ring": 128}, "int2": {"group": 32, "ring": 64}}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", NATIVE)
def test_native_sizes(kernel_device, name, dim, heads, dtype):
    """Full tiles, pipelined loads and programs that race; and twenty runs give the same bits."""
    lengths = (3000, 1, -1, 700, 64, 129)
    tensors, arguments = case(kernel_device, name, lengths, 1, heads, 2, dim, 64, dtype=dtype, **NATIVE[name])
    first = check_case(tensors, {**arguments, "causal": True})
    for _ in range(20):
        again = fp.flash_attn_with_kvcache(*tensors, **arguments, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again)), "depends on the order of arrival"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NATIVE)
def test_graph_replay_follows_the_lengths(kernel_device, name):
    """A captured step stays right when the lengths on the device change, replayed many times in a row."""
    tensors, arguments = case(kernel_device, name, (900, 64, 300), 1, 8, 2, 64, 64, dtype=torch.float16, **NATIVE[name])
    fp.flash_attn_with_kvcache(*tensors, **arguments)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp.flash_attn_with_kvcache(*tensors, **arguments)
    for lengths in ((900, 64, 300), (880, -1, 290), (899, 1, 0)):
        arguments["cache_seqlens"].copy_(torch.tensor(lengths))
        expected = fp.flash_attn_with_kvcache_reference(tensors[0].double(), *tensors[1:], **arguments)
        for _ in range(10):
            graph.replay()
        check(out, expected)


def test_a_graph_owns_its_counters(kernel_device, two_processors):
    tensors, arguments = case(kernel_device)
    for size, is_used in ((64, True), (1, False)):
        buffer = torch.zeros(size, dtype=torch.int32, device=kernel_device)
        with fp.counters_in(buffer):
            assert (decode_combine.arrival_counters(2, buffer.device) is buffer) == is_used
            for _ in range(2):
                check_case(tensors, arguments)
        assert not buffer.any()
        assert decode_combine.arrival_counters(1, buffer.device) is not buffer
