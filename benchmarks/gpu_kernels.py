"""Are the GPU kernels right, and how fast are they beside the limits of the machine and beside torch's own?

    python benchmarks/gpu_kernels.py [--only linear|attention] [--quick] [--output benchmarks/results/gpu_kernels.json]

Every case is first checked against the float32 reference, then timed by replaying a CUDA graph of calls that rotate
over copies of the weights (or of keys and values) of more than 200 MB together, so that nothing is found in the L2
cache; data is random. Times are the median, the smallest and the largest of 15 replays, in microseconds a call. In the
same run: the bandwidth of a device copy (bytes read plus bytes written) and the rate of a bf16 matrix product 8192^3,
beside which GB/s and TFLOP/s are to be read. A case that fails or is wrong is recorded as such, and the exit status is
then 1.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_efficient.evaluation import environment
from hf_efficient.kernels import efficient_linear, flash_paged


ROTATE_BYTES = 200e6
REPLAYS = 15
LINEAR_SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096), (8192, 8192), (16384, 16384)]  # N, K
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048]
LINEAR_FORMATS = {
    "int4 g64 asymmetric": dict(bits=4, group_size=64, symmetric=False),
    "int4 g128 symmetric": dict(bits=4, group_size=128, symmetric=True),
    "int8 per channel": dict(bits=8, group_size=-1, symmetric=True),
}
PREFILL = [(512, 32), (2048, 8), (8192, 2), (16384, 1)]  # length, batch
DECODE = [(1, 65536), (16, 8192), (64, 2048)]  # batch, context
HEADS, KV_HEADS = 32, 8
PEERS = {
    "SDPA flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
}


def time_calls(call, variants: int) -> dict:
    """call(i) for i in range(variants), several rounds in one CUDA graph -> microseconds a call {median, min, max}."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(min(3, variants)):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    order = [i % variants for i in range(max(variants, 20))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in order:
            call(i)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(order))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def copies_of(bytes_each: float) -> int:
    return max(2, int(ROTATE_BYTES // bytes_each) + 1)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of the expected values; infinite when something is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def limits() -> dict:
    """Device copy in GB/s (read plus written) and bf16 matrix product 8192^3 in TFLOP/s."""
    source = torch.randint(0, 127, (2**30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = time_calls(lambda i: target.copy_(source), 2)["median"]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = time_calls(lambda i: a @ b, 2)["median"]
    return {"copy_gb_s": 2 * source.numel() / copy / 1e3, "bf16_tflop_s": 2 * 8192**3 / product / 1e6}


def record(results: list, case: dict, call, variants: int, bytes_: float, flops: float, check=None, allowed=1e-2):
    """Checks (`check()` is the error against the reference; peers have none) and times one case, prints and appends
    it."""
    line = dict(case)
    try:
        if check is not None:
            line["error"] = check()
            line["correct"] = line["error"] <= allowed
        line["us"] = time_calls(call, variants)
        line["gb_s"], line["tflop_s"] = bytes_ / line["us"]["median"] / 1e3, flops / line["us"]["median"] / 1e6
        text = f"{line['us']['median']:9.1f} us {line['gb_s']:7.0f} GB/s {line['tflop_s']:6.1f} TFLOP/s"
        if check is not None:
            text += f"  error {line['error']:.1e}{'' if line['correct'] else '  WRONG'}"
    except (
        Exception
    ) as reason:  # a peer that does not take this shape, or a kernel of ours that fails: the line says so
        torch.cuda.synchronize()
        line["failed"] = text = f"{type(reason).__name__}: {str(reason)[:200]}"
    results.append(line)
    print(f"{' '.join(str(value) for value in case.values()):64s} {text}", flush=True)


def linear_cases(results: list, quick: bool) -> None:
    shapes, tokens_list = (LINEAR_SHAPES[:1], [1, 16, 128, 512]) if quick else (LINEAR_SHAPES, TOKENS)
    for n, k in shapes:
        dense_cases(results, n, k, tokens_list)
        for name, fmt in LINEAR_FORMATS.items():
            ours_cases(results, name, n, k, tokens_list, **fmt)
        int4pack_cases(results, n, k, tokens_list)


def dense_cases(results: list, n: int, k: int, tokens_list) -> None:
    count = copies_of(2 * n * k)
    dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    for m in tokens_list:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        case = dict(kernel="F.linear bf16", N=n, K=k, M=m)
        work = 2 * (n * k + m * k + m * n), 2 * m * n * k
        record(results, case, lambda i, x=x: F.linear(x, dense[i]), count, *work)


def ours_cases(results: list, name: str, n: int, k: int, tokens_list, bits: int, group_size: int, symmetric: bool):
    groups = 1 if group_size == -1 else k // group_size
    layout = dict(bits=bits, group_size=group_size, in_features=k)
    weights = []
    for _ in range(copies_of(n * k * bits / 8)):
        qweight = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
        scale = (torch.rand(n, groups, device="cuda") + 0.5).to(torch.bfloat16) * 2.0 ** (1 - bits)
        zero = torch.randint(0, 2**bits, (n, groups), dtype=torch.uint8, device="cuda")
        packed = efficient_linear.pack_weight(qweight, bits, group_size)
        weights.append((packed, scale, None if symmetric else zero))
    bytes_ = n * k * bits / 8 + n * groups * (2 if symmetric else 3)
    for m in tokens_list:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

        def call(i, x=x):
            return efficient_linear.weight_only_linear(x, *weights[i], **layout)

        def check(x=x, call=call):
            if not all(torch.equal(call(0), call(0)) for _ in range(5)):
                return float("inf")  # not deterministic
            return error(call(0), efficient_linear.weight_only_linear_reference(x, *weights[0], **layout))

        case = dict(kernel=f"efficient_linear {name}", N=n, K=k, M=m)
        record(results, case, call, len(weights), bytes_ + 2 * m * (n + k), 2 * m * n * k, check)


def int4pack_cases(results: list, n: int, k: int, tokens_list) -> None:
    """torch's own int4 product (tinygemm), group 64; timed only."""
    case = dict(kernel="torch._weight_int4pack_mm g64", N=n, K=k)
    count = copies_of(n * k / 2)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    try:
        weights = [torch._convert_weight_to_int4pack(codes, 8).clone() for _ in range(count)]
    except Exception as reason:
        results.append(dict(case, failed=str(reason)[:200]))
        return print(f"{case['kernel']}: {str(reason)[:200]}")
    scales = torch.rand(k // 64, n, 2, device="cuda", dtype=torch.bfloat16)
    for m in tokens_list:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

        def call(i, x=x):
            return torch._weight_int4pack_mm(x, weights[i], 64, scales)

        record(results, dict(case, M=m), call, count, n * k * (0.5 + 4 / 64) + 2 * m * (n + k), 2 * m * n * k)


def sdpa(q, k, v, backend, causal):
    """Over [B, S, H, D], as flash_attn_func takes them."""
    with torch.nn.attention.sdpa_kernel(backend):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def attention_cases(results: list, quick: bool) -> None:
    prefill, dims = (PREFILL[1:2], [128]) if quick else (PREFILL, [64, 128])
    for (length, batch), dim, causal in itertools.product(prefill, dims, [False, True]):
        prefill_cases(results, length, batch, dim, causal)
    for batch, context in DECODE[1:2] if quick else DECODE:
        for block in (16, 64, 256):
            decode_cases(results, batch, context, block)
    packed_case(results)


def prefill_cases(results: list, length: int, batch: int, dim: int, causal: bool) -> None:
    shape = (batch, length, HEADS, dim)
    count = copies_of(3 * 2 * batch * length * HEADS * dim)
    data = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(count)]

    def attend(i, attention=flash_paged.flash_attn_func):
        return attention(*data[i], causal=causal)

    def check():  # one row and two heads of the whole length: the reference keeps all scores
        part = [tensor[:1, :, :2] for tensor in data[0]]
        return error(attend(0)[:1, :, :2], flash_paged.flash_attn_func_reference(*part, causal=causal))

    case = dict(D=dim, S=length, B=batch, causal=causal)
    work = 8 * batch * length * HEADS * dim, 4 * batch * HEADS * length**2 * dim * (0.5 if causal else 1)
    record(results, dict(kernel="flash_paged prefill", **case), attend, count, *work, check)
    for name, backend in PEERS.items():
        call = lambda i, b=backend: sdpa(*data[i], b, causal)  # noqa: E731
        record(results, dict(kernel=f"{name} prefill", **case), call, count, *work)


def packed_case(results: list) -> None:
    """Rows of very different lengths packed one after another; and keys and values written to pages."""
    lengths = [17, 4096, 300, 1024, 1, 2000]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    total = sum(lengths)
    q = torch.randn(total, HEADS, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(total, KV_HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def attend(i, attention=flash_paged.flash_attn_varlen_func):
        return attention(q, k, v, bounds, bounds, max(lengths), max(lengths), causal=True)

    def check():
        return error(attend(0), attend(0, flash_paged.flash_attn_varlen_func_reference))

    flops = 2 * HEADS * 128 * sum(length**2 for length in lengths)
    record(
        results, dict(kernel="flash_paged varlen causal", T=total), attend, 1, 8 * total * HEADS * 128, flops, check
    )

    caches = [torch.zeros(1024, 16, KV_HEADS, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    slots = torch.randperm(1024 * 16, device="cuda")[:total]
    slots[::7] = -1

    def write(i):
        flash_paged.reshape_and_cache(k, v, caches[0], caches[1], slots)

    def check_write():
        write(0)
        flash_paged.reshape_and_cache_reference(k, v, caches[2], caches[3], slots)
        return 0.0 if all(torch.equal(caches[i], caches[i + 2]) for i in range(2)) else float("inf")

    case = dict(kernel="flash_paged reshape_and_cache", T=total)
    record(results, case, write, 1, 8 * total * KV_HEADS * 128, 0, check_write)


def decode_cases(results: list, batch: int, context: int, block: int) -> None:
    dim, blocks = 128, context // block
    kv_bytes = 2 * batch * context * KV_HEADS * dim * 2
    caches = []
    for _ in range(copies_of(kv_bytes)):
        pages = [
            torch.randn(batch * blocks, block, KV_HEADS, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        ]
        table = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
        caches.append((*pages, table))
    q = torch.randn(batch, 1, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    seqlens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    case = dict(D=dim, context=context, B=batch, block=block)

    def attend(i, attention=flash_paged.flash_attn_with_kvcache, rows=slice(None)):
        k_cache, v_cache, table = caches[i]
        arguments = dict(cache_seqlens=seqlens[rows], block_table=table[rows], causal=True)
        return attention(q[rows], k_cache, v_cache, **arguments)

    def check():
        expected = attend(0, flash_paged.flash_attn_with_kvcache_reference, slice(0, 1))
        return error(attend(0)[:1], expected)

    work = kv_bytes, 4 * batch * HEADS * context * dim
    record(results, dict(kernel="flash_paged decode", **case), attend, len(caches), *work, check)
    if block != 16:
        return
    dense = [[pages.view(batch, context, KV_HEADS, dim) for pages in cache[:2]] for cache in caches]
    for name, backend in PEERS.items():
        call = lambda i, b=backend: sdpa(q, *dense[i], b, False)  # noqa: E731
        record(results, dict(kernel=f"{name} decode, contiguous", **case), call, len(caches), *work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["linear", "attention"])
    parser.add_argument("--quick", action="store_true", help="one shape of each kind")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_kernels.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "gpu_kernels.py needs a CUDA or ROCm device, and torch sees none: nothing was measured.", file=sys.stderr
        )
        return 2
    torch.manual_seed(0)
    report = {"environment": environment.describe(), "limits": limits(), "results": []}
    print({name: round(value) for name, value in report["limits"].items()}, flush=True)
    for name, cases in (("linear", linear_cases), ("attention", attention_cases)):
        if options.only in (None, name):
            with torch.no_grad():
                cases(report["results"], options.quick)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {options.output}")
    ours = [line for line in report["results"] if line["kernel"].startswith(("efficient_linear", "flash_paged"))]
    return int(any("failed" in line or not line.get("correct") for line in ours))


if __name__ == "__main__":
    sys.exit(main())
