"""Are the linear kernels right, and how fast are they beside the limits of the machine and beside their peers?

    python benchmarks/linear.py [--quick] [--output benchmarks/results/gpu_linear.json]

Products of 1 to 1024 tokens with the layers of Llama-3-8B and 70B, and one of 8192^3, in every format, rotating over
more than 200 MB of weights. Peers, in the same process: torch's bf16 product (cuBLAS), `_weight_int4pack_mm`,
`_int_mm`, `_scaled_mm`; bitsandbytes and gemlite where they import. See gpu_timing.py for how; benchmarks/cpu_linear.py
is the same question on a CPU.
"""

import sys
from unittest import mock

import linear_peers
import torch
import torch.nn.functional as F
from gpu_timing import Benchmark, error, speedup
from linear_peers import int8_codes

from hf_efficient.kernels import efficient_linear as el
from hf_efficient.kernels.efficient_linear import (
    activation_reference,
    grouped,
    packing,
    sparse24,
    sparse24_packing,
    ternary,
    ternary_packing,
)
from hf_efficient.kernels.efficient_linear import weight_only as weight_only_module


SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]  # N, K: qkv, o, gate + up, down of Llama-3-8B
SHAPES += [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)]  # and of 70B
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024]
PROMPTS = [256, 512, 1024]  # tokens, with weights dequantized and not
SQUARE = (8192, 8192)
EXPERTS = 8


class Format:
    """One way to store a weight [n, k]: `make` it at random (a dict of tensors), `run` it, and its `reference`."""

    def __init__(self, name: str, make, run, reference, allowed: float = 1e-2):
        self.name, self.make, self.run, self.reference, self.allowed = name, make, run, reference, allowed


def of_layout(name: str, make, linear, reference, **layout) -> Format:
    """A format whose product takes the tensors of the weight, `in_features` and `layout`."""

    def arguments(x, weight):
        return {**weight, **layout, "in_features": x.shape[1]}

    return Format(name, make, *(lambda x, w, f=f: f(x, **arguments(x, w)) for f in (linear, reference)))


def weight_only(name: str, bits: int, group_size: int, symmetric: bool) -> Format:
    def make(bench, n, k):
        groups = packing.number_of_groups(k, group_size)
        made = dict(device=bench.device)
        packed = torch.randint(-(2**31), 2**31, (n, packing.packed_width(n, k, bits)), dtype=torch.int32, **made)
        scale = (torch.rand(n, groups, **made) + 0.5).to(bench.dtype) * 2.0 ** (1 - bits)
        zero = None if symmetric else torch.randint(0, 2**bits, (n, groups), dtype=torch.uint8, **made)
        return dict(packed=packed, scale=scale, zero_point=zero)

    run = el.weight_only_linear, el.weight_only_linear_reference
    return of_layout(name, make, *run, bits=bits, group_size=group_size)


def never_dequantized(format: Format) -> Format:
    """The kernel that reads codes at any number of tokens: from how many on is it slower than dequantizing?"""

    def run(x, weight):
        with mock.patch.object(weight_only_module, "DEQUANTIZE_ABOVE", 1 << 30):
            return format.run(x, weight)

    return Format(f"{format.name}, never dequantized", format.make, run, format.reference)


def codebook(name: str, table: tuple[float, ...], group_size: int) -> Format:
    bits = (len(table) - 1).bit_length()

    def make(bench, n, k):
        width = packing.packed_width(n, k, bits)
        packed = torch.randint(-(2**31), 2**31, (n, width), dtype=torch.int32, device=bench.device)
        groups = packing.number_of_groups(k, group_size)
        scale = (torch.rand(n, groups, device=bench.device) + 0.5).to(bench.dtype)
        return dict(packed=packed, codebook=torch.tensor(table, device=bench.device).to(bench.dtype), scale=scale)

    return of_layout(name, make, el.codebook_linear, el.codebook_linear_reference, bits=bits, group_size=group_size)


def trellis(name: str, bits: float) -> Format:
    def make(bench, n, k):
        qweight = torch.randint(0, 256, (int(-(-n // 32) * 4 * bits), k), dtype=torch.uint8, device=bench.device)
        packed, places = el.pack_trellis(qweight, bits=bits, out_features=n)
        return dict(packed=packed, places=places, scale=torch.rand(n, device=bench.device).to(bench.dtype))

    return Format(
        name,
        make,
        lambda x, weight: el.trellis_linear(x, **weight, bits=bits),
        lambda x, weight: el.trellis_linear_reference(x, **weight, bits=bits),
    )


def run_w8a8(x, weight):
    codes, scale, _ = el.quantize(x, "int8")
    return el.w8a8_linear(codes, weight["w_codes"], scale, weight["w_scale"], out_dtype=x.dtype)


_made_before: dict = {}


def codes_made_before(x, format: str):
    """The codes of x without the time to make them: they are made once, when the case is checked."""
    key = (x.data_ptr(), x.shape, format)
    if key not in _made_before:
        _made_before.clear()
        _made_before[key] = el.quantize(x, format)
    return _made_before[key]


def run_w8a8_only(x, weight):
    codes, scale, _ = codes_made_before(x, "int8")
    return el.w8a8_linear(codes, weight["w_codes"], scale, weight["w_scale"], out_dtype=x.dtype)


def reference_w8a8(x, weight):
    codes, scale, _ = activation_reference.quantize_reference(x, "int8")
    return activation_reference.w8a8_linear_reference(codes, weight["w_codes"], scale, weight["w_scale"])


def fp8(name: str, blocks: bool, quantize=el.quantize) -> Format:
    """Weights per channel with tokens, or blocks of 128 x 128 with blocks of 128."""
    kind = "fp8_block" if blocks else "fp8"

    def make(bench, n, k):
        codes = torch.randn(n, k, device=bench.device).to(torch.float8_e4m3fn)
        shape = (-(-n // 128), -(-k // 128)) if blocks else (n, 1)
        return dict(w_codes=codes, w_scale=torch.rand(shape, device=bench.device))

    def run(x, weight):
        codes, scale, _ = quantize(x, kind)
        return el.fp8_linear(codes, weight["w_codes"], scale, weight["w_scale"], out_dtype=x.dtype)

    def reference(x, weight):
        codes, scale, _ = activation_reference.quantize_reference(x, kind)
        return activation_reference.fp8_linear_reference(codes, weight["w_codes"], scale, weight["w_scale"])

    return Format(name, make, run, reference)


def make_ternary(bench, n, k):
    trits = torch.randint(-1, 2, (n, k), dtype=torch.int8, device=bench.device)
    return dict(packed=ternary_packing.pack_ternary(trits), w_scale=torch.rand(1, device=bench.device), out_features=n)


def run_ternary(x, weight, linear=ternary.ternary_linear, quantize=el.quantize, **options):
    codes, scale, _ = quantize(x, "int8")
    weight = dict(weight)
    return linear(codes, weight.pop("packed"), scale, weight.pop("w_scale"), **weight, **options)


def sparse(name: str, four_bits: bool) -> Format:
    group_size = 128 if four_bits else None

    def make(bench, n, k):
        mask = torch.rand(n, k // 4, 4, device=bench.device).argsort(-1).argsort(-1) < 2
        mask = mask.flatten(1)
        if not four_bits:
            values, places = sparse24_packing.pack_sparse24(bench.random(n, k) * mask)
            return dict(values=values, places=places, out_features=n)
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=bench.device)
        values, places = sparse24_packing.pack_sparse24_codes(torch.where(mask, codes, 8))
        scale = torch.rand(n, -(-k // 128), device=bench.device).to(bench.dtype)
        return dict(values=values, places=places, scale=scale, out_features=n)

    return of_layout(name, make, sparse24.sparse24_linear, sparse24.sparse24_linear_reference, group_size=group_size)


FORMATS = [
    weight_only("int4 g64 asymmetric", 4, 64, False),
    weight_only("int4 g128", 4, 128, True),
    weight_only("int8 per channel", 8, -1, True),
    weight_only("int3 g64 asymmetric", 3, 64, False),
    weight_only("int2 g64 asymmetric", 2, 64, False),
    codebook("NF4 g64", el.NF4, 64),
    trellis("trellis of 2 bits", 2),
    trellis("trellis of 3 bits", 3),
    Format("W8A8 int8", int8_codes, run_w8a8, reference_w8a8, allowed=2e-2),
    fp8("fp8 per channel", False),
    fp8("fp8 blocks", True),
    Format(
        "LLM.int8()",
        int8_codes,
        lambda x, weight: el.llm_int8_linear(x, **weight),
        lambda x, weight: activation_reference.llm_int8_reference(x, **weight),
        allowed=2e-2,
    ),
    Format(
        "ternary",
        make_ternary,
        lambda x, weight: run_ternary(x, weight, out_dtype=x.dtype),
        lambda x, weight: run_ternary(
            x, weight, ternary.ternary_linear_reference, activation_reference.quantize_reference
        ),
    ),
    sparse("2:4", False),
    sparse("2:4 int4 g128", True),
]
PRODUCTS_ONLY = [  # activations are quantized before
    Format("W8A8 int8, product only", int8_codes, run_w8a8_only, reference_w8a8, allowed=2e-2),
    fp8("fp8 per channel, product only", False, codes_made_before),
]
ALL_CASES = ("int4 g64 asymmetric", "int8 per channel", "W8A8 int8", "fp8 per channel", "LLM.int8()")
SOME_SHAPES, SOME_TOKENS = [(4096, 4096), (28672, 4096), (8192, 8192)], (1, 16, 64, 256)  # of the other formats


def bytes_of(weight: dict) -> int:
    return sum(tensor.nbytes for tensor in weight.values() if torch.is_tensor(tensor))


def ours(bench: Benchmark, format: Format, n: int, k: int, tokens_list) -> None:
    weights = [format.make(bench, n, k)]
    weights += [format.make(bench, n, k) for _ in range(bench.copies_of(bytes_of(weights[0])) - 1)]
    for m in tokens_list:
        x = bench.random(m, k)
        if format.name == "LLM.int8()":
            x[:, :: k // 8] *= 100.0  # outliers in eight columns

        def call(i, x=x):
            return format.run(x, weights[i])

        def check(x=x, call=call):
            first = call(0)
            if not all(torch.equal(call(0), first) for _ in range(1 if bench.tiny else 5)):
                return float("inf")  # not deterministic
            rows = slice(None) if len(x) <= 64 else slice(0, 16)
            return error(first[rows], format.reference(x[rows].contiguous(), weights[0]))

        case = dict(kernel=format.name, ours=True, N=n, K=k, M=m)
        work = bytes_of(weights[0]) + 2 * m * (n + k), 2 * m * n * k
        bench.record(case, call, len(weights), *work, check, format.allowed)


def gate_up(bench: Benchmark, n: int, k: int, tokens_list) -> None:
    """silu(x Wg^T) * (x Wu^T) in one launch; n counts the rows of both."""
    format = FORMATS[0]
    weights = [[format.make(bench, n // 2, k) for _ in range(2)] for _ in range(bench.copies_of(n * k // 2))]
    layout = dict(bits=4, group_size=64, in_features=k)
    for m in tokens_list:
        x = bench.random(m, k)

        def call(i, x=x, function=el.gate_up_silu):
            gate, up = weights[i]
            return function(x, (*gate.values(), None), (*up.values(), None), **layout)

        def check(x=x, call=call):
            return error(call(0), call(0, function=el.gate_up_silu_reference))

        work = sum(map(bytes_of, weights[0])) + 2 * m * (n // 2 + k), 2 * m * n * k
        case = dict(kernel="int4 g64 asymmetric, gate + up", ours=True, N=n, K=k, M=m)
        bench.record(case, call, len(weights), *work, check)


def experts(bench: Benchmark, n: int, k: int, tokens_list) -> None:
    """Rows spread evenly over the experts: the weights of all of them are read."""
    format = FORMATS[0]
    parts = [format.make(bench, n, k) for _ in range(EXPERTS)]
    weight = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    layout = dict(bits=4, group_size=64, in_features=k)
    for m in tokens_list:
        x = bench.random(m * EXPERTS, k)
        offsets = torch.arange(EXPERTS + 1, dtype=torch.int32, device=bench.device) * m

        def call(i, x=x, offsets=offsets):
            return grouped.grouped_linear(x, **weight, offsets=offsets, **layout)

        def check(x=x, offsets=offsets, call=call):
            return error(call(0), grouped.grouped_linear_reference(x, **weight, offsets=offsets, **layout))

        case = dict(kernel=f"int4 g64 asymmetric, {EXPERTS} experts", ours=True, N=n, K=k, M=m)
        work = bytes_of(weight) + 2 * len(x) * (n + k), 2 * len(x) * n * k
        bench.record(case, call, 1, *work, check)


def peers(bench: Benchmark, n: int, k: int, tokens_list) -> None:
    """torch's own products, bitsandbytes and gemlite; timed only."""
    count = bench.copies_of(2 * n * k)
    dense = [bench.random(n, k) for _ in range(count)]
    calls = {"bf16": (lambda x, i: F.linear(x, dense[i]), count, 2 * n * k)}
    if not bench.tiny:
        for make in (linear_peers.torch_peers, linear_peers.bitsandbytes_peer, linear_peers.gemlite_peer):
            with bench.attempt(make.__name__, ours=False):
                calls |= make(bench, n, k)
    for name, (call, variants, bytes_) in calls.items():
        for m in tokens_list:
            if "int4" in name and m > 64:
                continue  # torch's and gemlite's take too long there
            x = bench.random(m, k)
            work = bytes_ + 2 * m * (n + k), 2 * m * n * k
            case = dict(kernel=name, ours=False, N=n, K=k, M=m)
            bench.record(case, lambda i, x=x, call=call: call(x, i), variants, *work)


def goals(bench: Benchmark) -> list[tuple]:
    """What this run is to reach, as `harness.goals` takes it."""
    same, dense = ("N", "K", "M"), bench.find(kernel="bf16")

    def over_bf16(name, tokens, shapes=None):
        lines = [line for line in bench.find(kernel=name) if line["M"] in tokens]
        return speedup([line for line in lines if shapes is None or (line["N"], line["K"]) in shapes], dense, same)

    def over(name, other, most):
        lines = [line for line in bench.find(kernel=name) if line["M"] <= most]
        return speedup(lines, bench.find(kernel=other), same)

    few, up_to_64, square = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64), (8192,)
    large = [shape for shape in SHAPES if shape[0] * shape[1] >= 8192 * 8192]
    int4 = "int4 g64 asymmetric"
    return [
        ("int4, 4096x4096, 1 to 16 rows, times bf16", 2.1, over_bf16(int4, few, [(4096, 4096)])),
        ("int4, 4096x14336, 1 to 16 rows", 2.8, over_bf16(int4, few, [(4096, 14336)])),
        ("int4, 28672x4096, 1 to 16 rows", 3.0, over_bf16(int4, few, [(28672, 4096)])),
        ("int4, larger shapes, 64 rows", 2.2, over_bf16(int4, (64,), large)),
        ("int4, anywhere", 0.97, over_bf16(int4, TOKENS)),
        ("int4, 1 row, times torch int4pack", 1.0, over(int4, "torch int4pack g64", 1)),
        ("int8 weights, 28672x4096, up to 64 rows", 1.78, over_bf16("int8 per channel", up_to_64, [(28672, 4096)])),
        ("NF4, times int4", 0.95, over("NF4 g64", int4, 64)),
        ("W8A8 int8, product only, 8192^3", 1.84, over_bf16("W8A8 int8, product only", square)),
        ("W8A8 int8 with quantization, 8192^3", 1.7, over_bf16("W8A8 int8", square)),
        ("fp8, product only, 8192^3", 1.84, over_bf16("fp8 per channel, product only", square)),
        ("LLM.int8(), up to 64 rows", 1.5, over_bf16("LLM.int8()", up_to_64)),
    ]


def cases(bench: Benchmark, shapes, tokens) -> None:
    for n, k in shapes:
        for format in FORMATS:
            everything = format.name in ALL_CASES or bench.tiny
            if everything or (n, k) in SOME_SHAPES:
                most = 64 if format.name.startswith("2:4") else max(tokens)  # above, torch expands it
                chosen = [m for m in tokens if m <= most and (everything or m in SOME_TOKENS)]
                with bench.attempt(format.name, ours=True):
                    ours(bench, format, n, k, chosen)
        if (n, k) == (28672, 4096) or bench.tiny:
            few = [m for m in tokens if m <= 64]
            with bench.attempt("gate + up", ours=True):
                gate_up(bench, n, k, few)
            with bench.attempt("experts", ours=True):
                experts(bench, n // 2, k, few)
            for format in (FORMATS[0], never_dequantized(FORMATS[0])):
                with bench.attempt(format.name, ours=True):
                    ours(bench, format, n, k, [260] if bench.tiny else PROMPTS)
    square, rows = ((80, 256), [17]) if bench.tiny else (SQUARE, [8192])
    for format in (*PRODUCTS_ONLY, *(format for format in FORMATS if format.name in ALL_CASES[2:4])):
        with bench.attempt(format.name, ours=True):
            ours(bench, format, *square, rows)


def main(arguments: list[str] | None = None) -> int:
    bench = Benchmark("linear", __doc__, arguments)
    shapes, tokens = (SHAPES, TOKENS) if not bench.quick else (SHAPES[1:3], [1, 16, 64, 256])
    if bench.tiny:
        shapes, tokens = [(80, 256)], [3]
    with torch.no_grad():
        for is_ours in bench.turns():
            if is_ours:
                cases(bench, shapes, tokens)
                continue
            for n, k in shapes:
                peers(bench, n, k, tokens if bench.tiny else sorted({*tokens, *PROMPTS}))
            if not bench.tiny:
                peers(bench, *SQUARE, [8192])
    return bench.finish(goals(bench))


if __name__ == "__main__":
    sys.exit(main())
