"""How much of what pruning cost do ten minutes of training give back?

    python benchmarks/pruning_recovery.py [--rows GLOB ...] [--tokens FILE] [--calibration-tokens FILE]
        [--starts FOLDER] [--minutes 10 | --steps N] [--output FILE]

Model and measured texts are those of `benchmarks/quality.py`; a row prunes as the row of `benchmarks/pruning.py` of
that name does (the models are kept in FOLDER, and taken from there where they are) and calls `recover` with the dense
model as teacher. Trained on: the Wikipedia articles of gensim's test data without those that share passages with the
measured windows (more than ten runs of 13 tokens). The time is that of the call, the teacher's and the packing
included.
"""

import os
import tempfile
import time
from pathlib import Path

import harness
import torch
from pruning import rows as one_shot
from quality import texts

import hf_efficient
from hf_efficient.evaluation import environment, memory, perplexity, samples
from hf_efficient.layers import EfficientLinear


RUN, CHANCE = 13, 10  # tokens of a passage; an article with more of them in common is left out

# name -> (row of benchmarks/pruning.py, arguments of recover)
ROWS = {
    "50 % wanda": ("50 % wanda", {}),
    "50 % sparsegpt": ("50 % sparsegpt", {}),
    "50 % best": ("50 % best", {}),
    "50 % best, reverse divergence": ("50 % best", {"divergence": "reverse"}),
    "50 % best, a quarter text": ("50 % best", {"text_share": 0.25}),
    "50 % best, LoRA rank 32": ("50 % best", {"lora_rank": 32}),
    "2:4 best": ("2:4 best", {}),
}


def training_tokens(tokenizer, measured: torch.Tensor) -> torch.Tensor:
    """int64 [windows, 512] of articles that share no passages with `measured`, int64 [windows, length]."""
    flat, articles = measured.flatten().tolist(), []
    passages = {tuple(flat[i : i + RUN]) for i in range(len(flat) - RUN + 1)}
    for split in ("calibration", "evaluation"):
        for paragraph in samples.sample_text(split).split("\n\n"):
            if len(paragraph) < 80:  # a title: paragraphs are longer
                articles.append([])
            articles[-1].append(paragraph)
    kept = []
    for article in map("\n\n".join, articles):
        ids = tokenizer(article, add_special_tokens=False, verbose=False)["input_ids"]
        if sum(tuple(ids[i : i + RUN]) in passages for i in range(len(ids) - RUN + 1)) <= CHANCE:
            kept.append(article)
    ids = tokenizer("\n\n".join(kept), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)


def pruned(name: str, calibration: torch.Tensor, folder: Path):
    """The one-shot model of the row `name` of benchmarks/pruning.py, made in `folder` where it is not there."""
    if not folder.is_dir():
        arguments = dict(one_shot()[name])
        arguments.pop("quant_method")
        config = hf_efficient.SparseConfig(**arguments, calibration={"tokens": calibration})
        harness.load(quantization_config=config).save_pretrained(folder)
    return harness.load(folder)


def masks(model) -> dict[str, torch.Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, EfficientLinear)}
    return {name: module.format.mask(module.canonical(), module.in_features) for name, module in layers.items()}


def score(model, texts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: perplexity.negative_log_likelihood(model, windows) for name, windows in texts.items()}


def compared(after: dict, dense: dict, before: dict | None) -> dict[str, dict]:
    """Text -> its perplexities and the paired difference from `dense`, by what `score` gave of each model."""
    result = {}
    for text, nll in after.items():
        difference, error = perplexity.paired_difference(nll, dense[text])
        result[text] = {
            "perplexity_before": None if before is None else perplexity.perplexity(before[text]),
            "perplexity": perplexity.perplexity(nll),
            "perplexity_dense": perplexity.perplexity(dense[text]),
            "nll_difference_to_dense": difference,
            "nll_difference_standard_error": error,
            "nll": nll.tolist(),
        }
    return result


def measure(name: str, teacher, dense: dict, calibration, texts: dict, training, starts: Path, budget: dict) -> dict:
    """One row: perplexities before and after, and what the training took. dense: what `teacher` scores on `texts`."""
    start, options = ROWS[name]
    model = pruned(start, calibration, starts / start.replace(" ", "-").replace("%", "percent").replace(":", "of"))
    result = {"start": start, "recover": {**options, **budget}}
    before, kept = score(model, texts), masks(model)
    began, spent = time.perf_counter(), time.process_time()
    done = hf_efficient.recover(model, teacher, training, **options, **budget)
    result |= {**done, "wall_seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - spent}
    result["peak_memory_bytes"] = memory.peak_memory_bytes(torch.device("cpu"))
    result["masks_are_the_same"] = all(torch.equal(kept[key], mask) for key, mask in masks(model).items())
    result["share_of_zeros"] = 1 - sum(m.sum().item() for m in kept.values()) / sum(m.numel() for m in kept.values())
    return result | compared(score(model, texts), dense, before)


def main() -> None:
    """Measures the rows in turn; each is in the results when it is done."""
    parser = harness.parser(__doc__, "pruning_recovery.json")
    parser.add_argument("--rows", nargs="*", default=["*"], help="globs of row names")
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    parser.add_argument("--starts", type=Path, help="folder of one-shot models (default: a temporary one)")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, help="instead of minutes")
    options = parser.parse_args()
    scored = texts(options.tokens)
    calibration = harness.windows(options.calibration_tokens, "calibration", 128, 512)
    measured = harness.read_tokens(options.tokens) if options.tokens else scored["wikipedia"]
    training = training_tokens(harness.tokenizer(), measured)
    budget = {"minutes": options.minutes} if options.steps is None else {"steps": options.steps}
    teacher = harness.load()
    dense, done = score(teacher, scored), harness.read(options.output, {})
    with tempfile.TemporaryDirectory() as scratch:
        for name in harness.matching(ROWS, options.rows):
            load, starts = os.getloadavg()[1], options.starts or Path(scratch)
            row = measure(name, teacher, dense, calibration, scored, training, starts, budget)
            row |= {"training_windows": list(training.shape), "load_average_before": load}
            done[name] = {**row, "environment": environment.describe()}
            harness.write(options.output, done)
            was, now = row["wikipedia"]["perplexity_before"], row["wikipedia"]["perplexity"]
            print(f"{name}: {was:.2f} -> {now:.2f} in {row['wall_seconds']:.0f} s, {row['tokens']} tokens", flush=True)


if __name__ == "__main__":
    main()
