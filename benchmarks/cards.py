"""What do the recipes that one would publish measure? Writes their cards into `model_cards`.

    python benchmarks/cards.py

Figures come from the result files that `benchmarks/quality.py`, `pruning.py` and `pruning_recovery.py` wrote. The
commands of `hf-efficient` on a card make the same model: method and format are theirs, and so are the windows of
calibration text.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard

from hf_efficient.evaluation import samples
from hf_efficient.integrations import model_card


ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
MODEL = samples.SAMPLE_MODEL
TEXTS = {
    "wikipedia": "24 windows of 1024 tokens of Wikipedia articles",
    "news": "12 windows of 1024 tokens of news stories",
}
SPARSE = {"quant_method": "efficient_sparse", "sparsity": 0.5, "method": "alps", "refine": True}
KEPT = '{"bits": 4, "group_size": 64, "method": "gptq"}'


@dataclass(frozen=True)
class Recipe:
    """A model that one would publish. commands: arguments of hf-efficient; {text}: the options of `windows` windows of
    calibration text. file, row: where its figures stand; config: of a row that has none."""

    commands: tuple[str, ...]
    file: str
    row: str
    windows: int
    config: dict | None = None


RECIPES = {
    "SmolLM2-135M-Instruct-int4": Recipe(
        ("quantize {model} --bits 4 --group-size 64 --method gptq --refine {text} --output {name}",),
        *("quality", "int4 g64 gptq refine", 128),
    ),
    "SmolLM2-135M-Instruct-int8": Recipe(
        ("quantize {model} --bits 8 --group-size -1 --symmetric --method gptq {text} --output {name}",),
        *("quality", "int8 channel gptq", 32),
    ),
    "SmolLM2-135M-Instruct-2of4-int4": Recipe(
        (f"prune {{model}} --pattern 2:4 --method alps --refine --weights '{KEPT}' {{text}} --output {{name}}",),
        *("pruning", "2:4 best int4 g64", 32),
    ),
    "SmolLM2-135M-Instruct-recovered": Recipe(
        (
            "prune {model} --sparsity 0.5 --method alps --refine {text} --output pruned",
            "recover pruned --teacher {model} --texts calibration.txt --minutes 10 --output {name}",
        ),
        *("pruning_recovery", "50 % best", 128, SPARSE),
    ),
}


def result(recipe: Recipe) -> dict:
    """The row of the result file."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{recipe.file}.json").read_text())[recipe.row]


def commands(name: str) -> list[str]:
    """The commands that make a model, as one types them."""
    recipe = RECIPES[name]
    text = f"--calibration calibration.txt --num-samples {recipe.windows} --sequence-length 512"
    filled = {"{model}": MODEL, "{name}": name, "{text}": text}
    lines = []
    for line in recipe.commands:
        for place, value in filled.items():
            line = line.replace(place, value)
        lines.append(f"hf-efficient {line}")
    return lines


def config(name: str):
    """The config that makes a model, with its calibration text."""
    recipe = RECIPES[name]
    calibration = {"dataset": "calibration.txt", "num_samples": recipe.windows, "sequence_length": 512}
    return model_card.read_config({**(recipe.config or result(recipe)["config"]), "calibration": calibration})


def figures(row: dict, text: str) -> dict[str, float]:
    """perplexity, that of the base model, and the difference in nats with its standard error, paired by window."""
    found = row[text]
    difference = found["nll_difference"] if "nll_difference" in found else found["nll_difference_to_dense"]
    dense = found.get("perplexity_dense")
    if dense is None:
        dense = json.loads((ROOT / "benchmarks" / "results" / "quality.json").read_text())["bf16"][text]["perplexity"]
    error = found["nll_difference_standard_error"]
    return {"perplexity": found["perplexity"], "base": dense, "difference": difference, "error": error}


def card(name: str) -> str:
    """The card of a recipe."""
    recipe = RECIPES[name]
    row = result(recipe)
    options = {"base_model": MODEL, "licence": "apache-2.0", "commands": commands(name), "evaluated": True}
    found = ModelCard(model_card.render(name, config(name), **options))
    measured = {text: figures(row, text) for text in TEXTS}
    found.data.model_name = name
    found.data.eval_results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=text,
            dataset_name=TEXTS[text],
            metric_type="perplexity",
            metric_value=each["perplexity"],
            metric_args={"base_model": each["base"], "nll_difference": each["difference"],
                         "standard_error": each["error"]},
        )
        for text, each in measured.items()
    ]  # fmt: skip
    lines = ["| perplexity on | this model | base model | difference, nat (se) |", "| --- | ---: | ---: | ---: |"]
    for text, each in measured.items():
        values = f"{each['perplexity']:.2f} | {each['base']:.2f} | {each['difference']:+.4f} ({each['error']:.4f})"
        lines.append(f"| {TEXTS[text]} | {values} |")
    environment = row["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in environment["versions"].items())
    size = f"A weight takes {row['bits_per_weight']:.2f} bits. " if "bits_per_weight" in row else ""
    parts = [
        found.text.rstrip(),
        "## Evaluation",
        "\n".join(lines),
        f"{size}The text of calibration is other Wikipedia articles, cut into {recipe.windows} windows of 512 tokens; "
        "all texts come with gensim's test data. Differences are of the mean negative log-likelihood, paired by "
        f"window. The weights of the base model were {samples.SAMPLE_MODEL_SOURCE}.",
        f"From `benchmarks/results/{recipe.file}.json`, row `{recipe.row}`, which `benchmarks/{recipe.file}.py` "
        f"measured with the configs of these commands: {environment['hardware']['cores']} cores of "
        f"`{environment['hardware']['cpu']}`, `{versions}`, commit `{environment['commit']}`, `{environment['date']}`.",
    ]
    found.text = "\n\n".join(parts) + "\n"
    return str(found)


if __name__ == "__main__":
    for name in RECIPES:
        (CARDS / f"{name}.md").write_text(card(name))
