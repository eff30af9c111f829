"""The report of a run: a table, report.json, report.md and plot.png."""

import json
import re
from pathlib import Path

import torch

from hf_efficient.evaluation import perplexity
from hf_efficient.files import atomic_files


def compare(results: list[dict], variants: list[dict]) -> list[dict]:
    """Adds to every measured variant its perplexity, and its differences from and ratios to the first one.

    Args:
        results: what `hf_efficient.cli.measure` returned for each of `variants`, the baseline first.
        variants: their specifications, from which `quantization` and, where given, `weights_sha256` are kept.
    """
    base = results[0]
    compared = []
    for result, variant in zip(results, variants):
        nll, reference = torch.tensor(result["nll"]).double(), torch.tensor(base["nll"]).double()
        delta, error = perplexity.paired_difference(nll, reference)
        compared.append(
            {
                **{key: value for key, value in result.items() if key != "nll"},
                **{key: variant[key] for key in ("quantization", "weights_sha256") if key in variant},
                "nll_per_window": result["nll"],
                "perplexity": perplexity.perplexity(nll),
                "nll_difference": delta,
                "nll_difference_standard_error": error,
                "weights_ratio": result["weight_bytes"] / base["weight_bytes"],
                "speed_ratio": {
                    key: result[key]["tokens_per_second"]["median"] / base[key]["tokens_per_second"]["median"]
                    for key in ("one_prompt", "batch")
                },
            }
        )
    return compared


def table(content: dict) -> str:
    """The report's table in Markdown."""
    prompts = content["prompts"]
    head = [
        "",
        "weights MB",
        "peak memory MB",
        "first token ms",
        "tokens/s, 1 prompt",
        f"tokens/s, {prompts} prompts",
        "with speculation",
        "tokens per step",
        "perplexity",
        "difference, nat (se)",
    ]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for v in content["variants"]:
        speculation = [v[key].get("speculation") for key in ("one_prompt", "batch")]
        both = speculation[0] is not None
        rows.append(
            [
                _cell(v["name"]),
                f"{v['weight_bytes'] / 1e6:.1f} ({v['weights_ratio']:.2f}×)",
                f"{v['peak_memory_bytes'] / 1e6:.0f}",
                f"{v['batch']['time_to_first_token_s']['median'] * 1e3:.0f}",
                f"{v['one_prompt']['tokens_per_second']['median']:.1f} ({v['speed_ratio']['one_prompt']:.2f}×)",
                f"{v['batch']['tokens_per_second']['median']:.1f} ({v['speed_ratio']['batch']:.2f}×)",
                " / ".join(f"{s['tokens_per_second']['median']:.1f}" for s in speculation) if both else "–",
                " / ".join(f"{s['tokens_per_step']:.2f}" for s in speculation) if both else "1",
                f"{v['perplexity']:.2f}",
                f"{v['nll_difference']:+.4f} ({v['nll_difference_standard_error']:.4f})",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(text: str) -> str:
    """`text` on one line, with the special characters of Markdown escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))


def write(content: dict, folder: Path, card: str) -> list[Path]:
    """Writes report.json, report.md, plot.png and model_card.md, which holds `card`, into `folder`, atomically.
    Returns the paths."""
    with atomic_files(folder, "report.json") as scratch:
        (scratch / "report.json").write_text(json.dumps(content, indent=2) + "\n")
        (scratch / "report.md").write_text(_markdown(content))
        (scratch / "model_card.md").write_text(card)
        _plot(content, scratch / "plot.png")
        names = sorted(path.name for path in scratch.iterdir())
    return [folder / name for name in names]


def _markdown(content: dict) -> str:
    environment = content["environment"]
    hardware = environment["hardware"]
    lines = [
        f"# {content['model']}",
        "",
        table(content),
        "",
        *([f"- Weights of the base model: {content['model_source']}."] if content["model_source"] else []),
        f"- Hardware: {hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads, "
        f"{hardware['cpu_capability']}",
        "- Versions: " + ", ".join(f"{name} {version}" for name, version in environment["versions"].items()),
        f"- Commit {environment['commit']}, {environment['date']}, command: `{environment['command']}`",
        f"- Speed: medians of {content['variants'][0]['batch']['tokens_per_second']['runs']} runs, "
        f"{content['new_tokens']} new tokens per prompt, greedy; the first column with speculation is one prompt, the "
        f"second the batch of {content['prompts']} prompts. Tokens per step: tokens a sequence gained per verifying "
        "forward.",
        "- First token: the batch. Weights: bytes allocated after generating. Peak memory: of the whole process on a "
        "CPU.",
        f"- Perplexity: {content['windows'][0]} windows of {content['windows'][1]} tokens, {content['text']}; "
        "differences of the mean negative log-likelihood are paired by window (standard error in brackets).",
        "",
        "![plot](plot.png)",
        "",
        "## What they answer",
        "",
    ]
    for variant in content["variants"]:
        answer = " ".join(variant["answer"].split())
        lines += [f"- **{variant['name']}**: {answer}"]
    return "\n".join(lines) + "\n"


def _plot(content: dict, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = content["variants"]
    names = [variant["name"] for variant in variants]
    panels = {
        "weights, MB": [variant["weight_bytes"] / 1e6 for variant in variants],
        "tokens/s, 1 prompt": [variant["one_prompt"]["tokens_per_second"]["median"] for variant in variants],
        f"tokens/s, {content['prompts']} prompts": [v["batch"]["tokens_per_second"]["median"] for v in variants],
        "perplexity": [variant["perplexity"] for variant in variants],
    }
    figure = Figure(figsize=(3.2 * len(panels), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, values) in zip(figure.subplots(1, len(panels)), panels.items()):
        bars = axis.bar(names, values, color=["#999999", *["#3b6ea5"] * (len(names) - 1)])
        axis.bar_label(bars, [f"{value:.4g}" for value in values], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", labelrotation=20, labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
