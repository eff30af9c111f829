"""Tables of what is measured on CPUs: speed beside other engines, memory, tiers of instructions."""

from result_files import load, markdown


# name in cpu_generate.json -> what a reader calls it
DECODERS = {
    "stock bf16": "transformers, bfloat16",
    "bitsandbytes nf4": "bitsandbytes NF4",
    "torchao int8": "torchao int8",
    "quanto int8": "quanto int8",
    "llama.cpp": "llama.cpp, Q4_1",
    "ours bf16": "**hf_efficient**, bfloat16",
    "ours int8": "**hf_efficient**, int8",
    "ours int4": "**hf_efficient**, int4",
    "ours int4, int4 head": "**hf_efficient**, int4, output head in int4",
    "ours int4, int8 head": "**hf_efficient**, int4, output head in int8",
    "ours int4, embeddings": "**hf_efficient**, int4, embeddings and head in int8",
    "ours int4, 4-bit embeddings": "**hf_efficient**, int4, embeddings and head in int4",
    "ours int3": "**hf_efficient**, int3",
    "ours int2": "**hf_efficient**, int2",
    "ours NF4": "**hf_efficient**, NF4",
    "ours k-means": "**hf_efficient**, k-means of 4 bits",
    "ours int4, rotated": "**hf_efficient**, int4, rotated",
    "ours W8A8": "**hf_efficient**, W8A8",
    "ours LLM.int8()": "**hf_efficient**, LLM.int8()",
    "ours FP8": "**hf_efficient**, FP8",
    "ours BitNet": "**hf_efficient**, BitNet",
}
ENGINES = (
    "ours bf16",
    "ours int4",
    "ours int4, int4 head",
    "ours int4, int8 head",
    "ours W8A8",
    "llama.cpp",
    "OpenVINO",
    "ONNX Runtime",
    "vLLM",
    "ik_llama.cpp",
)
TIERS = {  # contender in cpu_tiers.json -> what a reader calls it
    "torch, AVX2": "`torch`, on a CPU with AVX2 alone",
    "no compiler": "no compiler: torch's operators",
    "no compiler, wheel": "no compiler, kernels from the wheel",
    "llama.cpp, avx2": "llama.cpp built for AVX2",
    "llama.cpp, native": "llama.cpp built for this CPU",
}


def generated(way: str, batch: int, prompt, key: str) -> float | None:
    """The median of one cell of cpu_generate.json, SmolLM2; None where it was not measured."""
    for row in load("cpu_generate")["results"]:
        if (row["model"], row["way"], row["batch"], row["prompt"]) == ("smollm2", way, batch, prompt):
            return row[key]["median"] if row.get(key) else None
    return None


def decode() -> str:
    """Decode and prompt speed of generate() on a CPU."""
    cells = ((1, 32, "decode"), (8, 32, "decode"), (1, 1024, "decode"), (1, 512, "prefill"))
    rows = []
    for way, label in DECODERS.items():
        found = [generated(way, batch, prompt, f"{what}_tokens_per_s") for batch, prompt, what in cells]
        if any(found):
            rows.append([label, *("" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in found)])
    header = "tokens/s | decode, one prompt | decode, batch of 8 | decode after 1,024 tokens | prompt of 512 tokens"
    return markdown(header, "lrrrr", rows)


def fresh() -> str:
    """What a new process needs to its first token and to 32."""
    rows = []
    for row in load("cpu_generate")["results"]:
        if row["prompt"] == "fresh process" and "failed" not in row:
            way, *how = row["way"].rsplit(", saved", 1)
            cells = [f"{row[key]['median']:.1f}" for key in ("first_token_s", "32_tokens_s")]
            cells.append(f"{row['peak_memory_bytes'] / 1e6:,.0f}" if "peak_memory_bytes" in row else "")
            rows.append([DECODERS[way] + "".join(f", saved{part}" for part in how), *cells])
    return markdown("a new process | first token, s | 32 tokens, s | peak memory, MB", "lrrr", rows)


def engines() -> str:
    """generate() on a CPU beside engines with environments of their own."""
    results = [row for row in load("cpu_generate_peers")["results"] if row["model"] == "smollm2"]
    measured = {row["way"] for row in results}
    rows, names = [], {name: label for name, label in DECODERS.items() if name in ENGINES and name in measured}
    names |= {name: name for name in ENGINES if name not in names and name in measured}
    for case, run in dict.fromkeys((row["case"], row["run"]) for row in results):
        found = {row["way"]: row for row in results if (row["case"], row["run"]) == (case, run)}
        if all(name.startswith("ours") or name not in ENGINES for name in found):
            continue  # `formats`, and ours alone
        shape, _, new = case.partition("+")
        batch, prompt = shape.split("x")
        key, scale = ("decode_tokens_per_s", 1) if new else ("first_token_s", 1e3)
        what = f"{'decode, tokens/s' if new else 'first token, ms'}: {batch} × {prompt}"
        cells = [found[name].get(key) if name in found else None for name in names]
        cpu = next(iter(found.values()))["cpu"]
        rows.append([what, cpu, *("" if cell is None else f"{cell * scale:,.0f}" for cell in cells)])
    return markdown(" | ".join(["sequences × prompt", "CPU", *names.values()]), "ll" + "r" * len(names), rows)


def formats() -> str:
    """Decoding in each format beside weights in as many bits, of one run."""
    results = [row for row in load("cpu_generate_peers")["results"] if row["model"] == "smollm2"]
    run = [row["run"] for row in results if row["way"] == "stock bf16"][-1]
    speed = {row["way"]: row["decode_tokens_per_s"] for row in results if row["run"] == run}
    rows = []
    for goal in load("cpu_generate_peers")["goals"]:
        way, _, rest = goal["goal"].removeprefix("decode of ").partition(" over ")
        like = rest.removesuffix(", 1x32+64")
        if like in speed and way in speed and like != "stock bf16":
            stock = speed[way] / speed["stock bf16"]
            cells = [f"{speed[way]:.0f}", f"{goal['measured']:.2f} of {like.removeprefix('ours ')}"]
            rows.append(
                [DECODERS[way].replace("**hf_efficient**, ", ""), *cells, f"{goal['at_least']}", f"{stock:.1f}"]
            )
    header = "format | decode, tokens/s | speed | goal | times as fast as transformers, bfloat16"
    return markdown(header, "lrrrr", rows)


def cpu_memory() -> str:
    """Resident peaks of processes that load and generate."""
    rows = []
    for row in load("cpu_memory")["results"]:
        name = row["way"].removesuffix(", saved")
        cells = [f"{row[key] / 1e6:,.0f}" if row.get(key) else "" for key in ("peak_bytes", "wide_peak_bytes")]
        first = f"{row['first_token_s']:.2f}" if "first_token_s" in row else ""
        rows.append(
            [row["model"], {"stock bf16": "transformers, bfloat16"}.get(name, DECODERS.get(name, name)), *cells, first]
        )
    header = "model | loaded from its checkpoint | peak, MB | after 8 × 1,024 tokens, MB | first token of a process, s"
    return markdown(header, "llrrr", rows)


def tiers() -> str:
    """generate() in each tier of the C++ kernels, beside llama.cpp."""
    return _tiers("cpu_tiers")


def tiers_without_bfloat16() -> str:
    """The same on a CPU without instructions for bfloat16, also for a batch."""
    return _tiers("cpu_tiers_vnni", batch=True)


def _tiers(file: str, batch: bool = False) -> str:
    rows = []
    for row in load(file)["generate"]:
        speeds = [row["decode_tokens_per_s"]["median"]]
        if batch:
            speeds.append(row.get("batch_decode_tokens_per_s", {}).get("median"))
        cells = ["" if speed is None else f"{speed:.0f}" for speed in speeds]
        first = row["time_to_first_token_s"]["median"]
        rows.append([TIERS.get(row["contender"], f"`{row['contender']}`"), *cells, f"{512 / first:,.0f}"])
    header = "tokens/s, int4 | decode |" + " decode, batch of 8 |" * batch + " prompt of 512 tokens"
    return markdown(header, "lrr" + "r" * batch, rows)


def tier_rows() -> str:
    """Products of one row in the tier avx2, beside torch's operators."""
    found = [row for row in load("cpu_tiers")["rows"] if row["torch_uses"] == "AVX2"]
    rows = []
    for row in found:
        if row["tier"] == "avx2":
            other = next(other for other in found if other["case"] == row["case"] and other["tier"] == "torch")
            shares = [f"{100 * each['of_read_bandwidth']:.0f} %" for each in (other, row)]
            times = [f"{each['us']['median']:,.0f}" for each in (other, row)]
            rows.append([row["case"].replace(" x ", " × "), *times, f"{row['times_torch']:.1f}", *shares])
    header = "µs | torch | `avx2` | times as fast | bandwidth, torch | bandwidth, `avx2`"
    return markdown(header, "lrrrrr", rows)
