"""How fast are linear layers on a CPU, beside bf16, torchao and bitsandbytes; where does each of our operators win?

    python benchmarks/cpu_linear.py [--threads 2] [--shapes 576x576,4096x4096] [--rows 1,8] [--contenders bf16,2:4]
        [--output FILE]

Layers of SmolLM2-135M and of an 8B model in bfloat16, 1 to 1024 tokens. Every contender rotates over copies of its
weight that together do not fit the last-level cache, and the contenders take turns, so that changes of the machine's
speed hit all of them. Times are medians with quartiles in microseconds; GB/s are bytes of the weight over the median,
beside the bandwidth at which all threads read memory. `gop_s` are 2 * rows * N * K over the median, `of_dot_peak` their
share of what cpu_peaks.py measures in the same process: of int8 products where inputs are rounded, else of
bfloat16's; with AMX of its tiles.
The products of a prompt, beside the peak:

    python benchmarks/cpu_linear.py --rows 512 --contenders "bf16,bf16 recorded,int8,int4,int8 rounded,int4 rounded,w8a8
        native" --output benchmarks/results/cpu_linear_prompts.json

"int4" and "int8" are what a layer uses where C++ kernels can be compiled; "int4 torch" and "int8 torch" are what it
uses elsewhere, torch's operators. `INT4_NATIVE_ROWS` and `INT8_NATIVE_ROWS` of hf_efficient.kernels.linear.torch_cpu
follow from the crossings reported at the end. "50 %" and "2:4" are pruned bfloat16 weights, stored sparse. "bf16
recorded" is our own dense product, as captured forwards run it. "rounded" are `int8_on_cpu=True`; "w8a8 native" what
`W8A8Config` runs, "w8a8" torch's operators.
"""

import ctypes
import functools
import importlib.metadata
import json
import os
import statistics
import time

import harness
import torch
import torch.nn.functional as F
from cpu_peaks import dot_peaks

from hf_efficient.evaluation import environment
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.kernels.linear import w8a8 as activation_linear
from hf_efficient.kernels.linear.codes import packed_width
from hf_efficient.kernels.linear.torch_cpu import Int4CpuLayout, Int8CpuLayout
from hf_efficient.kernels.linear.w8a8_layouts import int8_layout
from hf_efficient.kernels.linear.weight_only import device_layout
from hf_efficient.kernels.replay import instructions, recorder


SHAPES = [(576, 576), (1536, 576), (576, 1536), (4096, 4096)]  # out_features, in_features
ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512, 1024)
ROTATE_BYTES = 128e6  # four times the last-level cache of most machines that are not servers
SECONDS_A_CASE = 0.3
GROUP = 64


def compiled(bits: int, rounds_inputs: bool = False):
    """What a layer of `bits` bits computes with: groups with zero points, 8 bits per channel and symmetric."""

    def make(n: int, k: int):
        codes = torch.randint(0, 256, (n, packed_width(k, bits)), dtype=torch.uint8)
        group = -1 if bits == 8 else GROUP
        scale = torch.rand(n, 1 if bits == 8 else k // GROUP).bfloat16()
        zero_point = None if bits == 8 else torch.randint(0, 2**bits, scale.shape, dtype=torch.uint8)
        arguments = dict(bits=bits, group_size=group, in_features=k, dtype=torch.bfloat16)
        return device_layout(codes, scale, zero_point, **arguments, int8_on_cpu=rounds_inputs)

    return make


def trellis(bits: int):
    """Codes along a trellis, as a layer computes with them."""

    def make(n: int, k: int):
        format = TrellisFormat(bits)
        codes = torch.randint(0, 256, format.shapes(n, k)["qweight"], dtype=torch.uint8)
        return format.layout({"qweight": codes, "scale": torch.rand(n, 1).bfloat16()}, k, torch.bfloat16)

    return make


def int4_torch(n: int, k: int) -> Int4CpuLayout:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale = torch.rand(n, k // GROUP).bfloat16()
    zero_point = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    return Int4CpuLayout(codes, scale, zero_point, 4, GROUP, k, torch.bfloat16)


def int8_torch(n: int, k: int) -> Int8CpuLayout:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    return Int8CpuLayout(codes, torch.rand(n, 1).bfloat16(), None, torch.bfloat16)


def w8a8(n: int, k: int):
    codes, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1)
    return lambda x: activation_linear.quantized_linear(x, codes, scale, format="int8")


def w8a8_native(n: int, k: int):
    tensors = {"qweight": torch.randint(-127, 128, (n, k), dtype=torch.int8), "scale": torch.rand(n, 1)}
    return int8_layout(tensors, torch.bfloat16, "int8", None)


def bf16(n: int, k: int):
    weight = torch.randn(n, k).bfloat16()
    return lambda x: F.linear(x, weight)


def bf16_recorded(n: int, k: int):
    weight, instruction = torch.randn(n, k).bfloat16(), instructions.Instruction(instructions.OPS["DENSE"])
    instruction.b.data, run = weight.data_ptr(), recorder.interpreter()
    instruction.a.type = instructions.TYPES[torch.bfloat16]

    def call(x, weight=weight):
        y = x.new_empty(len(x), n)
        instruction.sizes[1:] = len(x), n, k
        instruction.a.data, instruction.y.data = x.data_ptr(), y.data_ptr()
        run(ctypes.addressof(instruction), 1)
        return y

    return call


@functools.cache
def pruned_tensors(format, n: int, k: int) -> dict[str, torch.Tensor]:
    """Random 16-bit weights of which half are 0."""
    group = 4 if isinstance(format, Sparse24Format) else k
    mask = torch.rand(n, k // group, group).argsort(-1).lt(group // 2).flatten(1)
    return format.pack(torch.randn(n, k).bfloat16(), mask)


def pruned(format):
    """What a layer in `format` computes with."""
    return lambda n, k: format.layout(pruned_tensors(format, n, k), k, torch.bfloat16)


def torch_int4pack(n: int, k: int):
    """torch's operator by itself: what our native int4 path must not be slower than."""
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 2)
    scales = torch.rand(k // GROUP, n, 2).bfloat16()
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def torchao(config_name: str):
    def make(n: int, k: int):
        import torchao.quantization as quantization

        layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
        quantization.quantize_(layer, getattr(quantization, config_name)())
        return layer

    return make


def bitsandbytes_nf4(n: int, k: int):
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    return layer.to(torch.bfloat16).to("cpu")


BYTES_A_WEIGHT = {"bf16": 2, "bf16 recorded": 2, "50 %": 9 / 8, "2:4": 9 / 8}
BYTES_A_WEIGHT |= dict.fromkeys(("int8", "int8 rounded", "w8a8", "torchao int8", "torchao w8a8", "int8 torch"), 1)
BYTES_A_WEIGHT |= {f"int{bits}": bits / 8 + 3 / GROUP for bits in (2, 3, 4)}
BYTES_A_WEIGHT["int4 rounded"] = BYTES_A_WEIGHT["int4"]
ROUNDED = ("int4 rounded", "int8 rounded", "w8a8", "w8a8 native", "torchao w8a8")  # whose inputs are
INT4_BYTES = 0.5 + 4 / GROUP  # torch's operators
BYTES_A_WEIGHT |= {f"trellis {bits}": bits / 8 for bits in (2, 3, 4)}
CONTENDERS = {  # name -> (make, method of the object to time; None: the object itself)
    "bf16": (bf16, None),
    "bf16 recorded": (bf16_recorded, None),
    "50 %": (pruned(BitmapFormat()), "matmul"),
    "2:4": (pruned(Sparse24Format()), "matmul"),
    "int2": (compiled(2), "matmul"),
    "int3": (compiled(3), "matmul"),
    "int4": (compiled(4), "matmul"),
    **{f"trellis {bits}": (trellis(bits), "matmul") for bits in (2, 3, 4)},
    "int8": (compiled(8), "matmul"),
    "int4 torch": (int4_torch, "matmul"),
    "int4 torch native": (int4_torch, "native"),
    "int4 torch dequantize": (int4_torch, "many_rows"),
    "int8 torch": (int8_torch, "matmul"),
    "int8 torch native": (int8_torch, "native"),
    "int8 torch dequantize": (int8_torch, "many_rows"),
    "int4 rounded": (compiled(4, True), "matmul"),
    "int8 rounded": (compiled(8, True), "matmul"),
    "w8a8": (w8a8, None),
    "w8a8 native": (w8a8_native, "matmul"),
    "torch int4pack": (torch_int4pack, None),
    "torchao int8": (torchao("Int8WeightOnlyConfig"), None),
    "torchao w8a8": (torchao("Int8DynamicActivationInt8WeightConfig"), None),
    "bitsandbytes nf4": (bitsandbytes_nf4, None),
}


def bytes_of(name: str, n: int, k: int) -> float:
    kind = name.removesuffix(" native").removesuffix(" dequantize")
    return n * k * BYTES_A_WEIGHT.get(kind, INT4_BYTES)


def contenders(n: int, k: int, names: list[str], rotate: float = ROTATE_BYTES) -> dict:
    """name -> list of calls of x, one a copy of the weight, which take `rotate` bytes. Peers that do not import or run
    are left out, with a line."""
    calls, made = {}, {}
    for name in names:
        make, method = CONTENDERS[name]
        if make not in made:
            copies = max(2, min(400, int(rotate // bytes_of(name, n, k)) + 1))
            try:
                objects = [make(n, k) for _ in range(copies)]
                (getattr(objects[0], method) if method else objects[0])(torch.randn(2, k).bfloat16())
            except Exception as reason:
                print(f"{name}: not measured, {type(reason).__name__}: {str(reason)[:120]}")
                objects = []
            made[make] = objects
        if made[make]:
            calls[name] = [getattr(item, method) if method else item for item in made[make]]
    return calls


def measure(
    n: int, k: int, bandwidth: float, peaks: dict[str, float], names: list[str], counts: tuple[int, ...] = ROWS
) -> list[dict]:
    """One record for every contender and number of rows in `counts`."""
    records = []
    with torch.no_grad():
        calls = contenders(n, k, names)
        for rows in counts:
            x = torch.randn(rows, k).bfloat16()
            times = {name: [] for name in calls}
            for variants in calls.values():
                variants[0](x)
            turn, end = 0, time.perf_counter() + SECONDS_A_CASE * len(calls)
            while turn < 5 or (time.perf_counter() < end and turn < 300):
                for place, (name, variants) in enumerate(calls.items()):
                    # those that share their copies are never at the same one at the same time
                    call = variants[(turn + place * len(variants) // len(calls)) % len(variants)]
                    start = time.perf_counter()
                    call(x)
                    times[name].append((time.perf_counter() - start) * 1e6)
                turn += 1
            dense = statistics.median(times["bf16"])
            for name, values in times.items():
                low, median, high = statistics.quantiles(values, n=4)
                speed = bytes_of(name, n, k) / median / 1e3
                record = {"out_features": n, "in_features": k, "rows": rows, "kernel": name, "turns": turn}
                record |= {"us": round(median, 1), "quartiles": [round(low, 1), round(high, 1)]}
                record |= {"times_bf16": round(dense / median, 3), "gb_s": round(speed, 2)}
                record["of_read_bandwidth"] = round(speed / bandwidth, 3)
                record["gop_s"] = round(2 * rows * n * k / median / 1e3, 1)
                kind = "int8" if name in ROUNDED else "bfloat16"
                if peak := max(peaks.get(kind, 0), peaks.get(f"amx_{kind}", 0)):
                    record["of_dot_peak"] = round(record["gop_s"] / peak, 3)
                records.append(record)
            print(n, k, rows, {r["kernel"]: r["times_bf16"] for r in records[-len(calls) :]}, flush=True)
    return records


def crossing(records: list[dict], name: str) -> dict[str, int]:
    """For each shape, the largest number of rows up to which the native operator was the faster way every time."""
    times = {(r["out_features"], r["in_features"], r["rows"], r["kernel"]): r["us"] for r in records}
    best = {}
    for n, k in dict.fromkeys((r["out_features"], r["in_features"]) for r in records):
        best[f"{n}x{k}"] = 0
        for rows in ROWS:
            if times[n, k, rows, f"{name} native"] > times[n, k, rows, f"{name} dequantize"]:
                break
            best[f"{n}x{k}"] = rows
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__, "cpu_linear.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="out_features x in_features")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of tokens")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="names of CONTENDERS, bf16 among them")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    bandwidth = harness.read_bandwidth(10)
    peaks = dot_peaks(options.threads)
    print(f"read bandwidth {bandwidth:.1f} GB/s, dot products {peaks} GOP/s")
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    names, counts = options.contenders.split(","), tuple(map(int, options.rows.split(",")))
    records = [record for shape in shapes for record in measure(*shape, bandwidth, peaks, names, counts)]
    crossings = [name for name in ("int4", "int8") if f"{name} torch native" in names and counts == ROWS]
    result = {
        "question": "a linear layer on CPU: bf16, ours and peers; microseconds, interleaved",
        "environment": environment.describe(),
        "peers": {
            distribution.name: distribution.version
            for distribution in importlib.metadata.distributions()
            if distribution.name in ("torchao", "bitsandbytes")
        },
        "load_average": os.getloadavg(),
        "read_bandwidth_gb_s": round(bandwidth, 2),
        "dot_product_peaks_gop_s": {kind: round(peak, 1) for kind, peak in peaks.items()},
        "native_up_to_rows": {name: crossing(records, f"{name} torch") for name in crossings},
        "results": records,
    }
    harness.write(options.output, result)
    print(json.dumps(result["native_up_to_rows"], indent=1))
    return 0


if __name__ == "__main__":
    main()
