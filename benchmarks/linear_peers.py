"""The linear layers that benchmarks/linear.py is measured beside: torch's own products, bitsandbytes and gemlite; timed
only.

Each function gives name -> (call of (x, i), copies of the weight, bytes of one), and raises where its package is
missing.
"""

import torch
import torch.nn.functional as F
from gpu_timing import Benchmark


def int8_codes(bench, n, k):
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=bench.device)
    return dict(w_codes=codes, w_scale=torch.rand(n, 1, device=bench.device) / 127)


def torch_peers(bench: Benchmark, n: int, k: int) -> dict:
    """name -> (call of (x, i), copies, bytes)."""
    count4, count8 = bench.copies_of(n * k / 2), bench.copies_of(n * k)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    int4 = [torch._convert_weight_to_int4pack(codes, 8).clone() for _ in range(count4)]
    scales = torch.rand(k // 64, n, 2, device="cuda", dtype=bench.dtype)
    int8 = [int8_codes(bench, n, k) for _ in range(count8)]
    float8 = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(count8)]

    def int_mm(x, i):  # with the quantization of x and the scales that a layer needs
        scale = x.abs().amax(1, keepdim=True).float() / 127
        codes = (x / scale).round().to(torch.int8)
        rows = F.pad(codes, (0, 0, 0, max(0, 32 - len(x))))  # it takes no fewer than 17
        return (torch._int_mm(rows, int8[i]["w_codes"].t())[: len(x)] * scale * int8[i]["w_scale"].t()).to(x.dtype)

    def scaled_mm(x, i):
        scale = x.abs().amax(1, keepdim=True).float() / 448
        codes = (x / scale).to(torch.float8_e4m3fn)
        options = dict(out_dtype=bench.dtype, use_fast_accum=False)
        return torch._scaled_mm(codes, float8[i].t(), scale, int8[0]["w_scale"].t().contiguous(), **options)

    def int4pack(x, i):
        return torch._weight_int4pack_mm(x, int4[i], 64, scales)

    return {
        "torch int4pack g64": (int4pack, count4, n * k // 2 + scales.nbytes),
        "torch _int_mm, dynamic": (int_mm, count8, n * k),
        "torch _scaled_mm, dynamic": (scaled_mm, count8, n * k),
    }


def bitsandbytes_peer(bench: Benchmark, n: int, k: int) -> dict:
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    dense = bench.random(n, k)
    nf4 = [quantize_4bit(dense, blocksize=64, quant_type="nf4") for _ in range(bench.copies_of(n * k / 2))]

    def call(x, i):
        return bitsandbytes.matmul_4bit(x, nf4[i][0].t(), quant_state=nf4[i][1])

    return {"bitsandbytes NF4": (call, len(nf4), n * k // 2)}


def gemlite_peer(bench: Benchmark, n: int, k: int) -> dict:
    from gemlite.core import DType, GemLiteLinear

    layers = []
    for _ in range(bench.copies_of(n * k / 2)):
        layer = GemLiteLinear(
            4, group_size=128, in_features=k, out_features=n, input_dtype=DType.BF16, output_dtype=DType.BF16
        )
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        groups = n * k // 128
        layer.pack(codes, torch.rand(groups, 1, device="cuda"), torch.full((groups, 1), 8.0, device="cuda"), None)
        layers.append(layer)
    return {"gemlite int4 g128": (lambda x, i: layers[i](x), len(layers), n * k // 2)}
