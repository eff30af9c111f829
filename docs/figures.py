"""Tables and the chart of the documentation, made from `benchmarks/results`.

A table stands in a Markdown file between `<!-- figure: NAME -->` and `<!-- end -->`.

    python docs/figures.py           # fills every table, writes the chart and the pages that are made as a whole
    python docs/figures.py --check   # exits with 1 where a file differs from what its results say
"""

import argparse
import re
import sys
from pathlib import Path

from environment_figures import environments, import_time, upstream
from learning_figures import learning, losses
from quality_figures import all_methods, choose, larger, peer_methods
from result_files import RESULTS, load, machine, markdown
from speculation_figures import assisted, goals, speculation


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- figure: (\w+) -->\n).*?(<!-- end -->)", re.S)

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
    "ours int4, int8 head": "**hf_efficient**, int4, output head in int8",
    "ours int4, embeddings": "**hf_efficient**, int4, embeddings and head in int8",
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
    "ours int4, int8 head",
    "ours W8A8",
    "llama.cpp",
    "OpenVINO",
    "ONNX Runtime",
    "vLLM",
)
TIERS = {  # contender in cpu_tiers.json -> what a reader calls it
    "torch, AVX2": "`torch`, on a CPU with AVX2 alone",
    "no compiler": "no compiler: torch's operators",
    "no compiler, wheel": "no compiler, kernels from the wheel",
    "llama.cpp, avx2": "llama.cpp built for AVX2",
    "llama.cpp, native": "llama.cpp built for this CPU",
}
# points of the chart: name in cpu_generate.json, name in quality.json or of a peer, label, offset of the label, ours?
POINTS = (
    ("stock bf16", "bf16", "transformers bf16", (-8, 9), False),
    ("bitsandbytes nf4", "bitsandbytes NF4", "bitsandbytes NF4", (7, 4), False),
    ("torchao int8", "torchao int8", "torchao int8", (-8, -16), False),
    ("quanto int8", "quanto int8", "quanto int8", (8, -7), False),
    ("quanto int4", "quanto int4", "quanto int4", (7, 4), False),
    ("ours bf16", "bf16", "bf16", (7, 4), True),
    ("ours int8", "int8 channel gptq", "int8, GPTQ", (7, 4), True),
    ("ours int4", "int4 g64 gptq refine", "int4, GPTQ refined", (-40, -16), True),
    ("ours int4", "int4 g64 rtn", "int4, to nearest", (-36, -16), True),
)


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
    rows, names = [], {name: label for name, label in DECODERS.items() if name in ENGINES}
    names |= {name: name for name in ENGINES if name not in names}
    for case, run in dict.fromkeys((row["case"], row["run"]) for row in results):
        found = {row["way"]: row for row in results if (row["case"], row["run"]) == (case, run)}
        if all(name.startswith("ours") or name not in ENGINES for name in found):
            continue  # `formats`, and ours alone
        shape, _, new = case.partition("+")
        batch, prompt = shape.split("x")
        key, scale = ("decode_tokens_per_s", 1) if new else ("first_token_s", 1e3)
        what = f"{'decode, tokens/s' if new else 'first token, ms'}: {batch} × {prompt}"
        cells = [found[name].get(key) if name in found else None for name in names]
        rows.append([what, *("" if cell is None else f"{cell * scale:,.0f}" for cell in cells)])
    return markdown(" | ".join(["sequences × prompt", *names.values()]), "l" + "r" * len(names), rows)


def formats() -> str:
    """Decoding in each format beside weights in as many bits, of one run."""
    results = load("cpu_generate_peers")["results"]
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
    rows = []
    for row in load("cpu_tiers")["generate"]:
        decoded, first = row["decode_tokens_per_s"]["median"], row["time_to_first_token_s"]["median"]
        rows.append([TIERS.get(row["contender"], f"`{row['contender']}`"), f"{decoded:.0f}", f"{512 / first:,.0f}"])
    return markdown("tokens/s, int4 | decode | prompt of 512 tokens", "lrr", rows)


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


def cache() -> str:
    """Quality of quantized pages."""
    results = load("kv_quality")
    whole = results["auto"]["bytes_per_token"]
    rows = [
        ["bfloat16" if name == "auto" else name, f"{row['bytes_per_token'] / whole:.3f}", f"{row['perplexity']:.2f}",
         "" if name == "auto" else f"{row['kl_to_bf16']:.4f}"]
        for name, row in results.items()
    ]  # fmt: skip
    return markdown("pages | bytes of bfloat16 | perplexity | KL to bfloat16", "lrrr", rows)


def prompts() -> str:
    """What answers lose when half of the prompt is left out, by way and task."""
    ways = {}
    for row in load("prompt_compression")["records"]:
        ways.setdefault(row["way"], {})[row["task"]] = row
    rows = []
    for way, tasks in ways.items():
        losses = [f"{tasks[task]['loss']:.2f} ± {tasks[task]['loss_standard_error']:.2f}" for task in tasks]
        kept = [tasks[task]["needle_kept"] for task in ("word", "code")]
        seconds = min(row["seconds"] for row in tasks.values())  # the task that was disturbed least
        label = way.replace("ours", "**hf_efficient**").replace(", question", " with the question")
        rows.append([label, *losses, f"{sum(kept) / len(kept):.0%}", f"{seconds:.1f}"])
    return markdown(
        "half left out by | loss, words | loss, codes | loss, cloze | needles kept | seconds", "lrrrrr", rows
    )


def streamed() -> str:
    """Layers on the disk, alone and read ahead."""
    return markdown(
        "SmolLM2-135M, ms a forward of 64 tokens | in memory | on the disk | read ahead",
        "lrrr",
        [
            [row["weights"], *(f"{row['milliseconds'][way]:.0f}" for way in ("memory", "accelerate", "prefetch"))]
            for row in load("layer_prefetch")["records"]
        ],
    )


def disk_to_disk() -> str:
    """Memory that compressing a larger checkpoint took, under a limit of the system."""
    found = load("disk_to_disk")
    sizes = [f"{found[name] / 1e6:.0f}" for name in ("checkpoint", "allowed", "planned", "data")]
    header = "checkpoint, MB | `--memory`, MB | planned, MB | most that was taken, MB | kills, then the same bits"
    return markdown(header, "rrrrr", [[*sizes, str(len(found["killed_after"]))]])


def logits() -> str:
    """How far logits in bfloat16 are from those in float32."""
    rows = [
        [way, f"{found['mean']:.4f}", f"{found['largest']:.4f}"] for way, found in load("bf16_logits")["ways"].items()
    ]
    header = "bfloat16 by | distance to float32 by its length, mean | largest"
    return f"{markdown(header, 'lrr', rows)}\n\n{machine('bf16_logits')}"


def prefix_tiers() -> str:
    """A prompt that was seen before, by where its blocks lie."""
    found = load("prefix_tiers")
    cells = [f"{found['milliseconds'][name]:.0f}" for name in ("new", "pool", "host", "disk")]
    header = "SmolLM2-135M, tokens | new, ms to the first token | from the pool | from host memory | from the disk"
    return markdown(header, "rrrrr", [[str(found["tokens"]), *cells]])


def two_processes() -> str:
    """The first token of a process that decodes what another one read."""
    rows = [
        [str(row["tokens"]), *(f"{row['milliseconds'][part]:.0f}" for part in ("single", "transfer", "two"))]
        for row in load("prefill_decode")["records"]
    ]
    return markdown("SmolLM2-135M, tokens | one process, ms | sending its pages | two processes", "rrrr", rows)


def demo() -> str:
    """The table of `make demo`."""
    from hf_efficient.evaluation import report

    return report.table(load("demo_cpu"))


def serving() -> str:
    """The table of benchmarks/serving.py, which is made of its result file."""
    return f"{(RESULTS / 'serving.md').read_text().strip()}\n\n{machine('serving')}"


FIGURES = {
    "choose": choose,
    "larger": larger,
    "decode": decode,
    "engines": engines,
    "formats": formats,
    "cpu_memory": cpu_memory,
    "tiers": tiers,
    "tier_rows": tier_rows,
    "cache": cache,
    "prompts": prompts,
    "streamed": streamed,
    "disk_to_disk": disk_to_disk,
    "logits": logits,
    "prefix_tiers": prefix_tiers,
    "two_processes": two_processes,
    "learning": learning,
    "losses": losses,
    "demo": demo,
    "serving": serving,
    "environments": environments,
    "import_time": import_time,
    "upstream": upstream,
    "speculation": speculation,
    "assisted": assisted,
    "speculation_goals": goals,
}


def benchmarks_page() -> str:
    """docs/benchmarks.md: every table, with where it comes from."""
    parts = [
        "# Benchmarks",
        "This page is made from the files in `benchmarks/results`. `python docs/figures.py` makes it again.",
        "![Speed against perplexity](images/speed_quality.svg)",
        "## Decoding on a CPU", "SmolLM2-135M, greedy, medians of one run.", decode(), fresh(), machine("cpu_generate"),
        "## Serving", "`benchmarks/serving.py`: many requests at once, as docs/serving.md says.", serving(),
        "## The demo", "`make demo`: one small model beside plain transformers.", demo(), machine("demo_cpu"),
        "## Quality of quantized weights",
        "Perplexity on 24 windows of 1,024 tokens of Wikipedia, and on news, which no method was calibrated on. Bits "
        "count scales and zero points. The last column is a task of lm-evaluation-harness, for the rows that ran it "
        "(`benchmarks/quality_tasks.py`): which of four passages of a news story comes next, with the standard error.",
        all_methods(), machine("quality"),
        "Peers on the same windows, with their own packages. The chart takes their perplexities from here. "
        "llm-compressor is missing: it asks for an older transformers than this machine has. AutoRound is, too: "
        "`benchmarks/quality_peers.py` has its rows, but they have not been run to the end. llama.cpp's types for 2 "
        "to 4 bits need rows of a multiple of 256 inputs. Most of SmolLM2's rows have 576, so its quantizer takes "
        "other types with more bits for them. The table says which came out, as shares of the weights. Its importance "
        "matrix is that of 64 windows of the text that our methods saw.",
        peer_methods(), machine("quality_peers"),
        "## Quality of quantized pages", cache(), machine("kv_quality"),
        "## Shorter prompts", prompts(), machine("prompt_compression"),
        "## Pruning", "Perplexity after pruning single weights:", (RESULTS / "pruning.md").read_text().strip(),
        "And after structured pruning:", (RESULTS / "pruning_structured.md").read_text().strip(),
        "## Recovery and distillation", "Trained against the dense model:", learning(), losses(),
        machine("learning"),
        "## GPU kernels, predicted",
        "Rows that say predicted were not measured. `benchmarks/gpu_model.py` counts the instructions of each kernel's "
        "inner loop in its machine code. It predicts times from them, from the bytes read and from launches. A budget "
        "is what an H200 has time for while it reads memory at full speed.",
        (RESULTS / "gpu_model.md").read_text().strip(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """docs/api.md: one entry for each public name."""
    import hf_efficient

    lines = ["# API", "", "The public names of `hf_efficient`. Everything else may change without notice."]
    for name, module in hf_efficient._PUBLIC.items():
        if module.startswith("hf_efficient.integrations"):  # the folder stands beside hf_efficient in the repository
            module = module.removeprefix("hf_efficient.")
        lines += ["", f"## {name}", "", f"::: {module}.{name}"]
    return "\n".join(lines) + "\n"


def chart() -> str:
    """The SVG of speed against perplexity."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "hf_efficient", "svg.fonttype": "none", "font.size": 10})
    import io

    from matplotlib import pyplot

    quality = {name: row["wikipedia"]["perplexity"] for name, row in load("quality").items()}
    quality |= {name: row["wikipedia"]["perplexity"] for name, row in load("quality_peers").items()}
    figure, axis = pyplot.subplots(figsize=(7.2, 3.6))
    for way, method, label, offset, is_ours in POINTS:
        if method not in quality:
            continue
        x, y = generated(way, 1, 32, "decode_tokens_per_s"), quality[method]
        axis.scatter(x, y, color="#1f5fa8" if is_ours else "#b5533c", marker="o" if is_ours else "x", zorder=3)
        axis.annotate(label, (x, y), textcoords="offset points", xytext=offset)
    axis.set_xlabel("decode on two CPU cores, tokens/s")
    axis.set_ylabel("perplexity (lower is better)")
    axis.set_title("SmolLM2-135M: hf_efficient (dots) beside peers (crosses)", fontsize=11)
    axis.set_ylim(31, 18)
    axis.set_xlim(0, 250)
    axis.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def wanted() -> dict[Path, str]:
    """File -> what it must hold."""
    files = {DOCS / "benchmarks.md": benchmarks_page(), DOCS / "api.md": api_page()}
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        if path not in files:
            files[path] = MARKED.sub(lambda m: f"{m[1]}{FIGURES[m[2]]()}\n{m[3]}", path.read_text())
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something differs")
    options = parser.parse_args()
    stale = {path: text for path, text in wanted().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'differs' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    if not options.check:
        (DOCS / "images").mkdir(exist_ok=True)
        (DOCS / "images" / "speed_quality.svg").write_text(chart())
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
