"""Tables and the chart of the documentation, made from `benchmarks/results`.

A table stands in a Markdown file between `<!-- figure: NAME -->` and `<!-- end -->`.

    python docs/figures.py           # fills every table, writes the chart and the pages that are made as a whole
    python docs/figures.py --check   # exits with 1 where a file differs from what its results say
"""

import argparse
import re
import sys
from pathlib import Path

from cpu_figures import cpu_memory, decode, engines, formats, fresh, generated, tier_rows, tiers, tiers_without_bfloat16
from environment_figures import environments, import_time, upstream
from gpu_figures import gpu_attention, gpu_generate, gpu_linear, gpu_machine
from learning_figures import learning, losses, training_steps
from quality_figures import METHODS, all_methods, choose, larger, peer_methods
from result_files import RESULTS, load, machine, markdown, prose
from speculation_figures import assisted, goals, speculation


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- figure: (\w+) -->\n).*?(<!-- end -->)", re.S)

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
    """The table of benchmarks/serving.py, which is made of its result file, and which run each part is of."""
    runs = {}
    for row in load("serving")["rows"]:
        run = row["run"]
        at = f"at commit `{run['commit']}`" if run["commit"] else "at a commit that was not kept"
        runs.setdefault(f"{run['date'][:10]} {at}", []).append(row["part"])
    parts = "; ".join(f"{', '.join(dict.fromkeys(names))} on {run}" for run, names in runs.items())
    table = (RESULTS / "serving.md").read_text().strip()
    return f"{table}\n\n{machine('serving')}\n\n{prose(f'Measured: {parts}.')}"


FIGURES = {
    "choose": choose,
    "larger": larger,
    "decode": decode,
    "engines": engines,
    "formats": formats,
    "cpu_memory": cpu_memory,
    "tiers": tiers,
    "tiers_without_bfloat16": tiers_without_bfloat16,
    "tier_rows": tier_rows,
    "cache": cache,
    "prompts": prompts,
    "streamed": streamed,
    "disk_to_disk": disk_to_disk,
    "logits": logits,
    "prefix_tiers": prefix_tiers,
    "two_processes": two_processes,
    "learning": learning,
    "training_steps": training_steps,
    "losses": losses,
    "demo": demo,
    "serving": serving,
    "environments": environments,
    "import_time": import_time,
    "upstream": upstream,
    "gpu_generate": lambda: gpu_generate() + "\n\n" + prose(gpu_machine("gpu_generate")),
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
        all_methods(), machine("quality", METHODS),
        "Peers on the same windows, with their own packages. The chart takes their perplexities from here. "
        "llm-compressor is missing: it asks for an older transformers than this machine has. AutoRound tunes 50 steps "
        "a block, as its light recipe does (200 are its default). llama.cpp's types for 2 to 4 bits need rows of a "
        "multiple of 256 inputs. Most of SmolLM2's rows have 576, so its quantizer takes other types with more bits "
        "for them. The table says which came out, as shares of the weights. Its importance matrix is that of 64 "
        "windows of the text that our methods saw.",
        peer_methods(), machine("quality_peers"),
        "## Quality of quantized pages", cache(), machine("kv_quality"),
        "## Shorter prompts", prompts(), machine("prompt_compression"),
        "## Pruning", "Perplexity after pruning single weights:", (RESULTS / "pruning.md").read_text().strip(),
        "And after structured pruning:", (RESULTS / "pruning_structured.md").read_text().strip(),
        "## Recovery and distillation", "Trained against the dense model:", learning(), losses(),
        machine("learning"), training_steps(), machine("training_steps"),
        "## GPU kernels, measured",
        "`benchmarks/gpu.sh`: medians of graph replays. Data rotates over more than 200 MB. A column of times says how "
        "many times as fast as the peer we are. docs/gpus.md has whole models.",
        gpu_attention(), gpu_machine("gpu_attention"),
        "Products with quantized weights, times torch's bfloat16 product with as many tokens:",
        gpu_linear(), gpu_machine("gpu_linear"),
        "## GPU kernels, predicted",
        "Rows that say predicted were not measured. `benchmarks/gpu_model.py` counts the instructions of each kernel's "
        "inner loop in its machine code. It predicts times from them, from the bytes read and from launches. A budget "
        "is what an H200 has time for while it reads memory at full speed.",
        (RESULTS / "gpu_model.md").read_text().strip(),
    ]  # fmt: skip
    return "\n\n".join(part if "\n" in part else prose(part) for part in parts) + "\n"


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
