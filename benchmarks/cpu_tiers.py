"""How fast is each tier of the C++ kernels, beside torch's operators and llama.cpp for the same instructions?

    python benchmarks/cpu_tiers.py [--parts generate rows] [--llama avx2=FOLDER native=FOLDER] [--wheel FOLDER]
        [--tiers avx2 bf16] [--threads 2] [--repeats 4] [--output FILE]

A part that is not asked for stays in the file as an earlier run left it.

- generate: SmolLM2-135M-Instruct in int4 with an output head in int8, the sizes of llama.cpp's file (Q4_1, head in
  Q8_0). Tokens/s after a prompt of 32, for one sequence and (not llama.cpp) for eight, and seconds to the first token
  after 512. Each tier and each llama.cpp has a process; they take turns.
- rows: products of one row, and attention of one query over 1,024 tokens in pages, in microseconds; each tier beside
  torch's operators in the same process, in turns. Weights rotate over copies that do not fit the last-level cache.
  GB/s of the weight stand beside the bandwidth at which all threads read memory.

`--wheel` names a folder with a wheel that was built with `HF_EFFICIENT_PREBUILD`, as `pip install --target FOLDER
--no-deps WHEEL` makes it. Then two more contenders see no compiler and an empty folder of compiled kernels: one with
that wheel, one without.

For tiers without AVX-512 torch and oneDNN are limited to AVX2, too, as on a machine that has no more.

`--llama` names folders with llama-cpp-python, built from source for AVX2 and for this CPU (ten minutes each):

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF" \\
        pip install --target FOLDER --no-deps --no-binary llama-cpp-python llama-cpp-python
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --target FOLDER2 --no-deps --no-binary llama-cpp-python llama-cpp-python
    pip install --target FOLDER --no-deps diskcache     # and into FOLDER2
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cpu_attention
import cpu_linear
import harness
import torch
from cpu_generate import spread
from cpu_generate_models import Texts, folder_of
from cpu_generate_ways import Worker
from harness import rounded

from hf_efficient.evaluation import environment
from hf_efficient.kernels.attention import api
from hf_efficient.kernels.native import tiers


LIKE_LLAMA, SAVED = "ours int4, int8 head", "ours bf16"  # ways of cpu_generate.py: to quantize, to load what is saved
NEW, WARM, PATIENCE = 128, 8, 3.0  # tokens, tokens, seconds of a call
BATCH = 8  # sequences
SHAPES = ((1536, 576), (4096, 4096))
KERNELS = {  # name -> (contender of cpu_linear.py that is ours, the one that torch has)
    "int4": ("int4", "int4"),
    "int8": ("int8", "int8"),
    "int3": ("int3", "int3"),
    "int2": ("int2", "int2"),
    "2:4": ("2:4", "2:4"),
    "bfloat16": ("bf16 recorded", "bf16"),
}
TOKENS = 1024  # in pages
SECONDS_A_CASE = 0.25
WITHOUT = ("no compiler", "no compiler, wheel")  # contenders
NO_COMPILER = {"PATH": "", "CXX": "", tiers.VARIABLE: ""}
AVX2_ALONE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def surroundings(tier: str) -> dict[str, str]:
    """The variables of a process that runs `tier`."""
    limited = "avx512f" not in tiers.TIERS[tier].features and tier != "torch"
    return {tiers.VARIABLE: tier, **(AVX2_ALONE if limited else {})}


def contenders(options, empty: str) -> dict[str, tuple[str, dict[str, str]]]:
    """name -> (way of cpu_generate.py, variables of its process). empty: a folder without compiled kernels."""
    wheel, llamas = options.wheel, options.llama
    found = {}
    if "avx2" in options.tiers:
        found["torch, AVX2"] = SAVED, {tiers.VARIABLE: "torch", **AVX2_ALONE}
    found |= {name: (SAVED, surroundings(name)) for name in ("torch", *options.tiers)}
    if wheel:
        found[WITHOUT[0]] = SAVED, NO_COMPILER | {"HF_HOME": empty}
        found[WITHOUT[1]] = SAVED, NO_COMPILER | {"HF_HOME": empty, "PYTHONPATH": str(wheel.resolve())}
    return found | {f"llama.cpp, {name}": ("llama.cpp", {"PYTHONPATH": folder}) for name, folder in llamas.items()}


def generate(options) -> list[dict]:
    """A row for each contender."""
    workers, rows = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = folder_of("smollm2", temporary)
        quantizing = Worker(LIKE_LLAMA, folder, options.threads)
        for answer in (quantizing.read(), quantizing.ask(save=f"{temporary}/smollm2-int4")):
            if "failed" in answer:
                raise RuntimeError(answer["failed"])
        quantizing.close()
        for name, (way, variables) in contenders(options, f"{temporary}/empty").items():
            where = folder if way == "llama.cpp" else f"{temporary}/smollm2-int4"
            worker = Worker(way, where, options.threads, **variables)
            loading = worker.read()
            print(name, loading, file=sys.stderr)
            rows[name] = {"contender": name} | loading
            if "failed" not in loading:
                workers[name] = worker
        texts = Texts("smollm2", folder)
        common = dict(end=None, lookup=False, patience=PATIENCE)
        decode = dict(ids=texts.rows(1, 32), new=NEW, **common)
        batch = decode | {"ids": texts.rows(BATCH, 32)}
        prefill = dict(ids=texts.rows(1, 512), new=1, stop=1, **common)
        speeds = {name: ([], [], []) for name in workers}
        for turn in range(-1, options.repeats):
            for name, worker in workers.items():
                warm, calls = turn < 0, [decode, prefill] if name.startswith("llama.cpp") else [decode, prefill, batch]
                answers = [worker.ask(**{"stop": WARM if warm else NEW} | call, warm=warm) for call in calls]
                if failed := next((answer for answer in answers if "failed" in answer), None):
                    rows[name] |= failed
                elif not warm:
                    first, second, *many = answers
                    speeds[name][0].append((len(first["row"]) - 1) / first["decode"])
                    speeds[name][1].append(second["first"])
                    speeds[name][2].extend(BATCH * (len(each["row"]) - 1) / each["decode"] for each in many)
                    rows[name]["tokens"] = first["row"]
        for name, worker in workers.items():
            worker.close()
            if "failed" not in rows[name]:
                decoded, seconds, batched = speeds[name]
                rows[name] |= dict(decode_tokens_per_s=spread(decoded), time_to_first_token_s=spread(seconds, min))
                if batched:
                    rows[name]["batch_decode_tokens_per_s"] = spread(batched)
    right = rows["torch"].get("tokens", [])
    for row in rows.values():
        tokens = row.pop("tokens", [])
        row["tokens_as_torch"] = next((i for i, (a, b) in enumerate(zip(tokens, right)) if a != b), len(tokens))
    return list(rows.values())


@contextlib.contextmanager
def using(tier: str):
    """Kernels of `tier` in this process."""
    before = os.environ[tiers.VARIABLE]
    os.environ[tiers.VARIABLE] = tier
    yield
    os.environ[tiers.VARIABLE] = before


def one_row(names: list[str], threads: int, bandwidth: float) -> list[dict]:
    """Rows of the tiers `names` beside torch's operators, in this process. bandwidth: GB/s that can be read."""
    torch.set_num_threads(threads)
    names, found = ["torch", *names], []
    for kernel, (own, theirs) in KERNELS.items():
        for n, k in SHAPES:
            calls = {}
            for name in names:
                contender = theirs if name == "torch" else own
                with using(name):
                    made = cpu_linear.contenders(n, k, [contender], cpu_linear.ROTATE_BYTES / len(names))
                    calls[name] = made[contender]
            x = torch.randn(1, k).bfloat16()
            calls = {name: [functools.partial(call, x) for call in variants] for name, variants in calls.items()}
            size = cpu_linear.bytes_of(own, n, k)
            found += timed(f"{kernel}, {n} x {k}", calls, size, bandwidth)
    heads, kv_heads, dim = cpu_attention.MODELS["SmolLM2-135M"]
    keys, values = (torch.randn(1, TOKENS, kv_heads, dim).bfloat16() for _ in range(2))
    q = torch.randn(1, 1, heads, dim).bfloat16()
    for name in ("auto", "int8", "int4"):
        caches = cpu_attention.copies(cpu_attention.paged(keys, values, [TOKENS], name))
        calls = [functools.partial(api.flash_attn_with_kvcache, q, **cache) for cache in caches]
        size = sum(tensor.nbytes for tensor in caches[0].values())
        label = "bfloat16" if name == "auto" else name
        found += timed(f"attention over {label} pages", dict.fromkeys(names, calls), size, bandwidth)
    return found


def timed(case: str, calls: dict, size: float, bandwidth: float) -> list[dict]:
    """A row for each tier: its calls (tier -> one a copy) in turns. size: bytes that one reads."""
    times, turn = {name: [] for name in calls}, 0
    with torch.no_grad():
        for name, variants in calls.items():
            with using(name):
                variants[0]()
        end = time.perf_counter() + SECONDS_A_CASE * len(calls)
        while turn < 9 or time.perf_counter() < end:
            for place, (name, variants) in enumerate(calls.items()):
                call = variants[(turn + place * len(variants) // len(calls)) % len(variants)]
                os.environ[tiers.VARIABLE] = name
                start = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start) * 1e6)
            turn += 1
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, values in times.items():
        row = {"case": case, "tier": name, "us": spread(values, min), "times_torch": medians["torch"] / medians[name]}
        row["gb_s"] = size / medians[name] / 1e3
        rows.append(row | {"of_read_bandwidth": row["gb_s"] / bandwidth})
        print(json.dumps(rounded(rows[-1])), file=sys.stderr)
    return rows


def rows_of_all(options) -> list[dict]:
    """`one_row` in a process for tiers with AVX-512 and one for those without."""
    torch.set_num_threads(options.threads)
    bandwidth = harness.read_bandwidth(20)  # by all instructions of the CPU: with AVX2 alone torch's sum reads less
    groups, found = {"AVX2": [], "all": []}, []  # by the instructions that torch uses
    for name in options.tiers:
        groups["AVX2" if AVX2_ALONE.items() <= surroundings(name).items() else "all"].append(name)
    for instructions, group in groups.items():
        if group:
            command = [sys.executable, __file__, "--of", *group, "--threads", str(options.threads)]
            command += ["--bandwidth", str(bandwidth)]
            variables = {**os.environ, "OMP_NUM_THREADS": str(options.threads), **surroundings(group[0])}
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found += [{"torch_uses": instructions} | row for row in json.loads(done.stdout)]
    print(f"read bandwidth: {bandwidth:.1f} GB/s", file=sys.stderr)
    return found


def goals(result: dict) -> list[dict]:
    """Ratios of medians of one run."""
    speeds = {row["contender"]: row for row in result.get("generate", ())}

    def ratio(key: str, one: str, other: str, name: str = "median"):
        values = [speeds.get(of, {}).get(key, {}).get(name) for of in (one, other)]
        return values[0] / values[1] if all(values) else None

    decode, first = "decode_tokens_per_s", "time_to_first_token_s"
    lines = []
    for tier, llama in (("avx2", "llama.cpp, avx2"), ("bf16", "llama.cpp, native")):
        lines.append((f"int4 decode, {tier} over {llama}", 1.25, ratio(decode, tier, llama)))
        lines.append((f"prompt of 512, {tier} over {llama}", 1.5, ratio(first, llama, tier)))
    lines.append(("int4 decode, avx2 over avx512", 0.7, ratio(decode, "avx2", "avx512")))
    lines.append(("int4 decode without a compiler, wheel over torch", 1.0, ratio(decode, *WITHOUT[::-1])))
    lines.append(("int4 decode, wheel over compiled here", 0.95, ratio(decode, WITHOUT[1], tiers.present()[-1])))
    for row in result.get("rows", ()):
        if row["tier"] != "torch":
            lines.append((f"{row['case']}, {row['tier']} over torch's operators", 2.0, row["times_torch"]))
    return rounded(harness.goals(lines, True))


def named_folders(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, _, folder in pairs:
        if not Path(folder, "llama_cpp").is_dir():
            sys.exit(f"--llama {name}={folder}: {folder or 'no folder'} has no llama_cpp; see --help")
    return {name: str(Path(folder).resolve()) for name, _, folder in pairs}


def main() -> None:
    parser = harness.parser(__doc__, "cpu_tiers.json")
    parser.add_argument("--parts", nargs="+", choices=("generate", "rows"), default=("generate", "rows"))
    parser.add_argument("--llama", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER")
    parser.add_argument("--tiers", nargs="+", choices=tiers.present()[1:], default=tiers.present()[1:])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--of", nargs="+", help="internal: these tiers, in this process")
    parser.add_argument("--bandwidth", type=float, help="internal: GB/s at which memory is read")
    options = parser.parse_args()
    if options.of:
        return print(json.dumps(one_row(options.of, options.threads, options.bandwidth)))
    options.llama = named_folders(options.llama)
    if options.wheel and not (options.wheel / "hf_efficient/kernels/native/prebuilt").is_dir():
        sys.exit(f"--wheel {options.wheel}: no prebuilt kernels in it; see --help")
    result = harness.read(options.output, {"question": "each tier of the C++ kernels beside torch and llama.cpp"})
    for part, measure in (("generate", generate), ("rows", rows_of_all)):
        if part in options.parts:
            result[part] = rounded(measure(options))
            ran = dict(environment=environment.describe(), threads=options.threads, load_average=os.getloadavg())
            result[f"{part}_ran"] = ran | {"command": " ".join(["python", "benchmarks/cpu_tiers.py", *sys.argv[1:]])}
    result["goals"] = goals(result)
    harness.write(options.output, result)
    harness.print_goals(result["goals"])


if __name__ == "__main__":
    main()
