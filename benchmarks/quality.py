"""What does each quantization method cost in perplexity, at how many bits, and how long does it take?

    python benchmarks/quality.py [--rows GLOB ...] [--tokens FILE] [--calibration-tokens FILE] [--output FILE]
        [--checkpoint-dir DIR] [--minutes M]
    python benchmarks/quality.py --table          # the table and the plot of what has been measured, beside the peers

SmolLM2-135M-Instruct, all linears but the head, 24 windows of 1,024 tokens of Wikipedia articles, and 12 of news
stories that no method was calibrated on. Calibration, for every method that can use it: windows of 512 tokens of other
articles. Every row is made and measured in a process of its own (time and peak memory are those of `from_pretrained`),
and stands in the results when it is done: a run can be repeated row by row. Differences to bf16 are paired by window,
their standard errors stand beside them. Bits of a weight count codes, scales, zero points and whatever else is stored.
FILE: int64 [rows, length], .safetensors or .pt (read without unpickling objects); without it the windows come from
`sample_text()`.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import quality_tasks
import torch


WINDOWS, LENGTH, KL_WINDOWS = {"wikipedia": 24, "news": 12}, 1024, 4


WEIGHTS_ALONE = {"quant_method": "efficient_weight_only", "int8_on_cpu": False}
OWN_TEXT = {**WEIGHTS_ALONE, "calibration": None}
WHOLE_NAME, WHOLE = "10 minutes end to end", {"calibration": {"minutes": 10}}  # the phase after the blocks


def weight_only(bits, group, **options):
    return {**WEIGHTS_ALONE, "bits": bits, "group_size": group, **options}


def w8a8(**options):
    return {"quant_method": "efficient_w8a8", **options}


def rows() -> dict[str, dict | None]:
    """name -> arguments of a config, None for the model as it is. All are given the calibration tokens that name no
    calibration of their own."""
    table = {"bf16": None, "int8 channel rtn": weight_only(8, -1, symmetric=True, method="rtn")}
    for bits in (4, 3):
        table[f"int{bits} g64 fast, no text"] = {**OWN_TEXT, "bits": bits, "quality": "fast"}
    table["int4 g64 balanced, own text"] = {**OWN_TEXT, "bits": 4, "quality": "balanced"}
    for bits in (4, 3, 2):
        best = {**WEIGHTS_ALONE, "bits": bits, "quality": "best"}
        table |= {f"int{bits} best": best, f"trellis {bits} bits best": {**best, "codebook": "trellis"}}
    for bits in (4, 3, 2):
        for group in (32, 64, 128):
            for name in ("rtn", "mse", "hqq", "gptq", "awq"):
                if group == 64 or (bits == 4 and name in ("rtn", "gptq", "awq")):
                    table[f"int{bits} g{group} {name}"] = weight_only(bits, group, method=name, zero_point="integer")
            table[f"int{bits} g{group} gptq refine"] = weight_only(bits, group, method="gptq", refine=True)
    for bits in (4, 3):
        table[f"int{bits} g64 hqq, float zero points"] = weight_only(bits, 64, method="hqq", zero_point="float")
    table["int8 channel gptq"] = weight_only(8, -1, symmetric=True, method="gptq")
    table["int4 g64 rtn symmetric"] = weight_only(4, 64, symmetric=True, method="rtn")
    table["int4 channel gptq"] = weight_only(4, -1, method="gptq")
    table["int4 g64 awq refine"] = weight_only(4, 64, method="awq", refine=True)
    for bits in (4, 3, 2):
        table[f"int{bits} g64 gptq rotate"] = weight_only(bits, 64, method="gptq", rotate=True)
    for bits in (4, 3):
        table[f"int{bits} g64 gptq mixed"] = weight_only(bits, 64, method="gptq", mixed_precision=True)
        table[f"int{bits} g64 gptq mixed refine"] = weight_only(
            bits, 64, method="gptq", mixed_precision=True, refine=True
        )
    table["int8 channel rtn, int8_on_cpu"] = weight_only(8, -1, symmetric=True, method="rtn", int8_on_cpu=True)
    table["int4 g64 rtn, int8_on_cpu"] = weight_only(4, 64, method="rtn", int8_on_cpu=True)
    table["nf4 g64"] = weight_only(4, 64, codebook="nf4", method="rtn")
    table["nf4 g64 double quantization"] = weight_only(4, 64, codebook="nf4", method="rtn", double_quantization=True)
    table["fp4 g64"] = weight_only(4, 64, codebook="fp4", method="rtn")
    for name in ("mxfp4", "nvfp4"):
        table[name] = weight_only(4, "auto", codebook=name, method="rtn")
        table[f"{name} gptq"] = weight_only(4, "auto", codebook=name, method="gptq")
        refined = weight_only(4, "auto", codebook=name, method="gptq", refine=True)
        table |= {f"{name} gptq refine": refined, f"{name} gptq refine, {WHOLE_NAME}": {**refined, **WHOLE}}
    table["kmeans 4 bits g64"] = weight_only(4, 64, codebook="kmeans", method="rtn")
    table["kmeans 4 bits g64 gptq"] = weight_only(4, 64, codebook="kmeans", method="gptq")
    table["kmeans 4 bits channel"] = weight_only(4, -1, codebook="kmeans", method="rtn")
    table["kmeans 3 bits channel"] = weight_only(3, -1, codebook="kmeans", method="rtn")
    for bits in (4, 3.5, 3, 2.5, 2, 1.5):
        trellis = weight_only(bits, -1, codebook="trellis", method="gptq")
        table[f"trellis {bits:g} bits gptq"] = trellis
        table[f"trellis {bits:g} bits gptq refine"] = {**trellis, "refine": True}
        table[f"trellis {bits:g} bits yaqa"] = {**trellis, "method": "yaqa"}
        table[f"trellis {bits:g} bits yaqa refine"] = {**trellis, "method": "yaqa", "refine": True}
    for bits in (4.34, 3.33, 2.33, 2.03, 1.64):
        mixed = weight_only(bits, -1, codebook="trellis", method="gptq", mixed_precision=True)
        table[f"trellis {bits:g} bits mixed gptq"] = mixed
        table[f"trellis {bits:g} bits mixed gptq refine"] = refined = {**mixed, "refine": True}
        table[f"trellis {bits:g} bits mixed gptq refine, {WHOLE_NAME}"] = {**refined, **WHOLE}
    for bits in (4, 3, 2):
        yaqa = weight_only(bits, 64, method="yaqa")
        table |= {f"int{bits} g64 yaqa": yaqa, f"int{bits} g64 yaqa refine": {**yaqa, "refine": True}}
    for method in ("billm", "db_llm"):
        binary = weight_only(2, "auto", method=method)
        table |= {method: binary, f"{method} refine": {**binary, "refine": True}}
    for bits in (3, 2):
        slim = weight_only(bits, 64, method="slim_llm")
        table |= {f"slim_llm {bits} bits g64": slim, f"slim_llm {bits} bits g64 refine": {**slim, "refine": True}}
    table["pb_llm"] = weight_only(1, "auto", method="pb_llm")
    for bits in (4, 6):
        rounded = weight_only(4, 64, method="gptq", activation_bits=bits)
        table |= {f"w4a{bits} g64 gptq": rounded, f"w4a{bits} g64 gptq refine": {**rounded, "refine": True}}
    table["w6a6 g64 gptq"] = weight_only(6, 64, method="gptq", activation_bits=6)
    for method in ("absmax", "zeropoint", "smoothquant", "llm_int8"):
        table[f"w8a8 int8 {method}"] = w8a8(method=method)
    rotated = {"o_proj": {"rotate": True}, "down_proj": {"rotate": True}}
    table["w8a8 int8 smoothquant, o and down rotated"] = w8a8(method="smoothquant", overrides=rotated)
    table["w8a8 int8 llm_int8, 16 columns"] = w8a8(method="llm_int8", outlier_columns=16)
    for observer in ("absmax", "percentile", "entropy", "mse"):
        name = "w8a8 int8 absmax static" + ("" if observer == "absmax" else f", {observer} observer")
        table[name] = w8a8(method="absmax", activations="static", observer=observer)
    for observer in ("absmax", "mse"):
        name = "w8a8 int8 smoothquant static" + ("" if observer == "absmax" else f", {observer} observer")
        table[name] = w8a8(method="smoothquant", activations="static", observer=observer)
    table["w8a8 fp8 dynamic"] = w8a8(dtype="fp8")
    table["w8a8 fp8 static"] = w8a8(dtype="fp8", activations="static")
    table["w8a8 fp8 smoothquant"] = w8a8(dtype="fp8", method="smoothquant")
    for columns in (32, 64, 128):
        table[f"w8a8 fp8 llm_int8, {columns} columns"] = w8a8(dtype="fp8", method="llm_int8", outlier_columns=columns)
    return table


def config_of(arguments: dict | None, calibration: torch.Tensor, folder: Path | None = None):
    """The quantization config of a row, None without arguments. folder: keeps the progress of the calibration."""
    import transformers
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    import hf_efficient

    transformers.logging.set_verbosity_error()
    hf_efficient.register()
    if arguments is None:
        return None
    arguments = dict(arguments)
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING[arguments.pop("quant_method")]
    own = arguments.pop("calibration", {})  # None: text that the model writes itself
    own = own if own is None else {"tokens": calibration, "checkpoint_dir": folder, **own}
    return kind(**arguments, calibration=own)


def measure(
    arguments: dict | None, texts: dict[str, torch.Tensor], calibration: torch.Tensor, folder: Path | None = None
) -> dict:
    """One row: makes the model through `from_pretrained` and measures it on every text. A row that was resumed in
    `folder` has no seconds."""
    is_resumed = folder is not None and folder.exists()
    config = config_of(arguments, calibration, folder)
    from hf_efficient.evaluation import memory, perplexity
    from hf_efficient.layers import EfficientLinear

    torch.manual_seed(0)
    start = time.perf_counter()
    model = harness.load(quantization_config=config)
    result = {
        "seconds": None if is_resumed else time.perf_counter() - start,
        "peak_memory_bytes": memory.peak_memory_bytes(torch.device("cpu")),
    }
    weights = bits = 0
    for module in model.modules():
        if isinstance(module, EfficientLinear):
            count = module.out_features * module.in_features
            weights += count
            bits += count * module.format.bits_per_weight(module.out_features, module.in_features, torch.bfloat16)
    result["bits_per_weight"] = bits / weights if weights else 16.0
    for name, windows in texts.items():
        nll = perplexity.negative_log_likelihood(model, windows)
        result[name] = {
            "perplexity": perplexity.perplexity(nll),
            "standard_error_nat": (nll.std() / len(nll) ** 0.5).item(),
            "nll": nll.tolist(),
        }
    if config is not None:
        base = harness.load()
        divergence = [perplexity.kl_divergence(base, model, window) for window in texts["wikipedia"][:KL_WINDOWS]]
        result["kl_to_bf16"] = sum(divergence) / len(divergence)
    return result


def with_minutes(arguments: dict | None, minutes: float | None) -> dict | None:
    """The arguments of a row, which tunes the whole model for so long where it does at all."""
    if minutes is None or not (arguments or {}).get("quality") == "best":
        return arguments
    return {**arguments, "calibration": {"minutes": minutes}}


def texts(wikipedia: str | None) -> dict[str, torch.Tensor]:
    """name -> int64 [windows, LENGTH] that rows are measured on; `wikipedia`: a file for the first."""
    splits = {"wikipedia": (wikipedia, "evaluation"), "news": (None, "news")}
    return {name: harness.windows(*splits[name], count, LENGTH) for name, count in WINDOWS.items()}


def digests(texts: dict[str, torch.Tensor]) -> dict[str, str]:
    """Which windows rows are measured on: name -> a hash."""
    return {name: hashlib.sha256(texts[name].numpy().tobytes()).hexdigest()[:16] for name in WINDOWS}


def cells_of(row: dict) -> list[str]:
    """The cells of a table of a row's perplexities, divergence, seconds, GB and calibration windows."""
    cells = []
    for text in WINDOWS:
        own = row[text]
        cells.append(f"{own['perplexity']:.2f}")
        cells.append(f"{own['nll_difference']:+.4f} ({own['nll_difference_standard_error']:.4f})")
        if text == "wikipedia":
            cells.append(f"{row['kl_to_bf16']:.4f}" if "kl_to_bf16" in row else "")
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
    return [*cells, seconds, f"{row['peak_memory_bytes'] / 1e9:.2f}", str(row.get("calibration_windows", ""))]


def main(script: str, description: str, output: str, rows, write_table) -> None:
    """Runs `script` for each of its rows; `benchmarks/pruning.py` shares it."""
    parser = harness.parser(description, output)
    parser.add_argument("--rows", nargs="*", default=["*"], help="globs of row names")
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    parser.add_argument("--calibration-windows", type=int, default=128)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only rows that the output does not hold")
    parser.add_argument("--checkpoint-dir", type=Path, help="a row that is interrupted is resumed from there")
    parser.add_argument("--minutes", type=float, help="of tuning whole models, where a row does so")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        return write_table(options.output)

    from safetensors.torch import load_file, save_file

    from hf_efficient.evaluation import environment

    if options.one:
        tensors = load_file(options.tokens)
        calibration = tensors.pop("calibration")
        own = with_minutes(rows()[options.one], options.minutes)
        options.output.write_text(json.dumps(measure(own, tensors, calibration, options.checkpoint_dir)))
        return None
    if options.tokens and not options.calibration_tokens:
        parser.error("--tokens needs --calibration-tokens: the sample's calibration text may hold what is measured")
    tensors = texts(options.tokens)
    count = options.calibration_windows
    tensors["calibration"] = harness.windows(options.calibration_tokens, "calibration", count, 512)
    own_digests = digests(tensors)
    done = harness.read(options.output, {})
    if any(row["texts"] != own_digests for row in done.values()):
        sys.exit(f"{options.output} was measured on other texts: give --tokens as then, or another --output")
    chosen = harness.matching(rows(), options.rows)
    if "bf16" not in done and "bf16" not in chosen:
        chosen.insert(0, "bf16")
    with tempfile.TemporaryDirectory() as folder:
        tokens, result = Path(folder) / "tokens.safetensors", Path(folder) / "result.json"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tokens)
        for name in chosen:
            if options.missing and name in done:
                continue
            command = [sys.executable, script, "--one", name, "--tokens", str(tokens), "--output", str(result)]
            if options.checkpoint_dir is not None:
                command += ["--checkpoint-dir", str(options.checkpoint_dir / name.replace(" ", "-"))]
            if options.minutes is not None:
                command += ["--minutes", str(options.minutes)]
            if subprocess.run(command).returncode:
                sys.exit(f"{name} failed")
            row = {
                "config": with_minutes(rows()[name], options.minutes),
                "calibration_windows": len(tensors["calibration"]),
                "texts": own_digests,
            }
            row["load_average"] = os.getloadavg()[1]  # of 2 cores: time taken on a busy machine is longer
            row |= json.loads(result.read_text())
            for text in WINDOWS:
                base = torch.tensor((row if name == "bf16" else done["bf16"])[text]["nll"]).double()
                row[text] |= harness.score(torch.tensor(row[text]["nll"]).double(), base)
            done[name] = {**row, "environment": environment.describe()}
            harness.write(options.output, done)
            shown = [f"{text} {row[text]['perplexity']:.3f}" for text in ("wikipedia", "news")]
            print(name, *shown, f"{row['bits_per_weight']:.3f} bits {row['seconds'] or 0:.0f} s", flush=True)
    return None


def write_table(path: Path) -> None:
    """quality.md and quality.png beside the results."""
    done = json.loads(path.read_text())
    lines = [
        "| method | bits of a weight | perplexity | Δ nat (se) | KL to bf16 | news: perplexity | Δ nat (se) | s | GB | "
        "calibration windows, where used | next passage, acc (se) |"
    ]
    lines.append("|---|" + "---:|" * 10)
    tasks = harness.read(path.with_name("quality_tasks.json"), {})
    for name, row in sorted(
        done.items(), key=lambda item: (-item[1]["bits_per_weight"], item[1]["wikipedia"]["perplexity"])
    ):
        accuracy = quality_tasks.cell(tasks.get(name))
        lines.append(harness.row([name, f"{row['bits_per_weight']:.3f}", *cells_of(row), accuracy]))
    peers = harness.read(path.with_name("quality_peers.json"), {})
    lines += ["", "Peers on the same windows, with their own packages (`benchmarks/quality_peers.py`):", ""]
    lines += ["| peer | package | bits of a weight | perplexity | news: perplexity |", "|---|---|---:|---:|---:|"]
    for name, row in peers.items():
        perplexities = [f"{row[text]['perplexity']:.2f}" for text in WINDOWS]
        lines.append(harness.row([name, row["package"], f"{row['bits_per_weight']:.3f}", *perplexities]))
    harness.write_table(path, lines)

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    ours = [
        (row["bits_per_weight"], row["wikipedia"]["perplexity"], name) for name, row in done.items() if name != "bf16"
    ]
    axis.scatter([p[0] for p in ours], [p[1] for p in ours], color="#3b6ea5", label="hf_efficient")
    theirs = [(row["bits_per_weight"], row["wikipedia"]["perplexity"]) for row in peers.values()]
    axis.scatter([p[0] for p in theirs], [p[1] for p in theirs], color="#b5533c", marker="x", label="peers")
    best = {}
    for bits, value, name in sorted(ours):
        if value < best.get(min(8, round(bits)), (1e9,))[0]:
            best[min(8, round(bits))] = (value, bits, name)
    for value, bits, name in best.values():
        side = dict(ha="right", xytext=(-6, 8)) if bits > 7 else dict(ha="left", xytext=(6, -10))
        axis.annotate(f"{name}: {value:.2f}", (bits, value), fontsize=7, textcoords="offset points", **side)
    axis.axhline(done["bf16"]["wikipedia"]["perplexity"], color="#999999", linewidth=1, label="bf16")
    axis.set(
        xlabel="bits of a weight, everything counted", ylabel="perplexity", yscale="log", title="SmolLM2-135M-Instruct"
    )
    ticks = [20, 25, 30, 40, 60, 100]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.set_ylim(18.5, 140)  # int2 to nearest lies at 8e5
    axis.minorticks_off()
    axis.legend()
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main(__file__, __doc__, "quality.json", rows, write_table)
