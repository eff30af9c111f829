"""How much faster does a CPU decode when feed-forward layers compute only the neurons that a token needs; what is lost?

    python benchmarks/contextual_sparsity.py quality [--tokens FILE] [--calibration-tokens FILE] [--rows GLOB ...]
        [--windows 4]
    python benchmarks/contextual_sparsity.py speed [--rows GLOB ...] [--batch 1] [--threads 2] [--relu]
    python benchmarks/contextual_sparsity.py table

SmolLM2-135M-Instruct in bfloat16: its feed-forward layers have SiLU and hold 80 of its 135 million weights.

`quality` trains the predictors of every row (16 windows of 512 tokens), keeps them in `--predictors`, and measures them
on `--windows` windows of 1,024 tokens of other articles, with every token computed sparsely (`every_row`): perplexity,
the difference to dense paired by window, and the share of the neurons that was computed.

`speed` times `generate()`, the models taking turns in one process: greedy, a prompt of 32 tokens, 64 new ones; the
median time of a token after the first, best of three runs. "dense" is the same model through the same captured forwards
(`enable_speculation`), "stock" is transformers without this package. The prefill of 512 tokens is timed apart (best of
three). With --relu also an OPT (768 x 3072, 12 layers) with random weights: half of its neurons are zero by chance, so
it only shows that skipping costs nothing; `difference` is the relative difference of its logits to dense.

FILE: int64 [rows, length] as in quality.py; without it the windows come from `sample_text()`.
"""

import json
import statistics
import time
from pathlib import Path

import harness
import torch
from harness import load

import hf_efficient
from hf_efficient.evaluation import environment, perplexity
from hf_efficient.evaluation.bench import TokenClock
from hf_efficient.pruning.contextual.layer import every_row, layers_of


PROMPT, NEW, REPEATS = 32, 64, 3


def rows() -> dict[str, dict]:
    """name -> arguments of `sparsify_context`."""
    table = {f"gate, keep {keep:.0%}": dict(keep=keep) for keep in (0.7, 0.5, 0.4, 0.3, 0.2)}
    table |= {f"gate, recall {recall:.0%}": dict(recall=recall) for recall in (0.99, 0.97, 0.95, 0.9)}
    for rank in (64, 128):
        table |= {f"rank {rank}, keep {keep:.0%}": dict(keep=keep, rank=rank) for keep in (0.7, 0.5, 0.3)}
        table |= {f"rank {rank}, recall {recall:.0%}": dict(recall=recall, rank=rank) for recall in (0.97, 0.9)}
    return table


def evaluation_tokens(options, count: int) -> torch.Tensor:
    return harness.windows(options.tokens, "evaluation", count, 1024)


def quality(options) -> None:
    tokens = evaluation_tokens(options, options.windows)
    calibration = harness.windows(options.calibration_tokens, "calibration", 16, 512)
    dense = perplexity.negative_log_likelihood(load(), tokens)
    report("dense", {"perplexity": perplexity.perplexity(dense), "kept": 1.0, "windows": len(tokens)}, options)
    for name in harness.matching(rows(), options.rows):
        model = load()
        context = hf_efficient.sparsify_context(model, dict(tokens=calibration, batch_size=4), **rows()[name])
        context.save_pretrained(folder_of(options, name))
        shares = []

        def watch(layer, args, shares=shares):
            shares.append(layer.chosen(args[0][0]).float().mean().item())

        for layer in layers_of(model).values():
            layer.register_forward_pre_hook(watch)
        with every_row(model):
            nll = perplexity.negative_log_likelihood(model, tokens)
        difference, error = perplexity.paired_difference(nll, dense)
        row = {"perplexity": perplexity.perplexity(nll), "difference_nat": difference, "standard_error_nat": error}
        row["kept"] = statistics.fmean(shares)
        row["kept_of_layers"] = [layer["kept"] for layer in context.layers.values()]
        report(name, row | {"windows": len(tokens)}, options)


def tokens_per_second(model, ids: torch.Tensor) -> float:
    clock = TokenClock()
    length = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    model.generate(ids, stopping_criteria=[clock], **length)
    times = clock.seconds()
    return len(ids) / statistics.median(after - before for before, after in zip(times, times[1:]))


def speed(options) -> None:
    torch.set_num_threads(options.threads)
    dense = hf_efficient.enable_speculation(load())
    models = {"stock": load(), "dense": dense}
    for name in harness.matching(rows(), options.rows):
        sparse = hf_efficient.ContextualSparsity.from_pretrained(folder_of(options, name)).apply(load())
        models[name] = hf_efficient.enable_speculation(sparse)
    text = evaluation_tokens(options, 1)[:, :512]
    for name, model in models.items():
        rate = prompt_tokens_per_second(model, text)
        report(name, {f"prompt_tokens_per_s, {options.threads} threads": rate}, options)
    ids = text[:, :PROMPT]
    for batch in options.batch:
        measured(models, ids.expand(batch, -1), f"tokens_per_s, batch {batch}", options)
    if options.relu:
        measured(relu_models(), ids % 8192, "tokens_per_s, batch 1", options)


@torch.no_grad()
def prompt_tokens_per_second(model, ids: torch.Tensor) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        model(ids, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
    return ids.numel() / min(seconds)


def measured(models: dict, ids: torch.Tensor, field: str, options) -> None:
    best = dict.fromkeys(models, 0.0)
    for model in models.values():
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)  # captures the forwards
    for _ in range(REPEATS):
        for name, model in models.items():
            best[name] = max(best[name], tokens_per_second(model, ids))
    for name, rate in best.items():
        report(name, {f"{field}, {options.threads} threads": rate, **getattr(models[name], "found", {})}, options)


@torch.no_grad()
def relu_models() -> dict:
    from transformers import AutoModelForCausalLM, OPTConfig

    shape = dict(vocab_size=8192, hidden_size=768, ffn_dim=3072, num_hidden_layers=12, num_attention_heads=12)
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(OPTConfig(word_embed_proj_dim=768, **shape), dtype=torch.bfloat16).eval()
    models = {"random ReLU, dense": dense}
    tokens = torch.randint(3, 8192, (8, 256))
    for name, arguments in {"gate": dict(recall=1.0), "rank 128": dict(keep=0.5, rank=128)}.items():
        sparse = AutoModelForCausalLM.from_config(dense.config, dtype=torch.bfloat16).eval()
        sparse.load_state_dict(dense.state_dict())
        context = hf_efficient.sparsify_context(sparse, dict(tokens=tokens), **arguments)
        with every_row(sparse):
            exact, given = (model(tokens[:1]).logits.float() for model in (dense, sparse))
        difference = ((given - exact).norm() / exact.norm()).item()
        sparse.found = {"kept": context.kept, "difference": difference}
        models[f"random ReLU, {name}"] = sparse
    return {name: hf_efficient.enable_speculation(model) for name, model in models.items()}


def folder_of(options, name: str) -> Path:
    return Path(options.predictors) / name.replace(",", "").replace(" ", "-").replace("%", "")


def report(name: str, row: dict, options) -> None:
    """Adds `row` to the results of `name`, with what it was measured with."""
    results = harness.read(options.output, {"rows": {}})
    results["rows"][name] = results["rows"].get(name, {}) | {
        key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()
    }
    results[options.command] = environment.describe()
    harness.write(options.output, results)
    print(name, row, flush=True)


def table(options) -> None:
    found = json.loads(options.output.read_text())["rows"]
    speeds = sorted({key for row in found.values() for key in row if key.startswith("tokens_per_s")})
    print("| row | kept | perplexity | difference (nat) |", " | ".join(speeds), "|")
    print("|" + "---|" * (4 + len(speeds)))
    for name, row in found.items():
        loss = f"{row['difference_nat']:+.3f} ({row['standard_error_nat']:.3f})" if "difference_nat" in row else ""
        kept = f"{row['kept']:.0%}" if "kept" in row else ""
        cells = [kept, f"{row['perplexity']:.2f}" if "perplexity" in row else "", loss]
        cells += [f"{row[speed]:.1f}" if speed in row else "" for speed in speeds]
        print(harness.row([name, *cells]))


if __name__ == "__main__":
    parser = harness.parser(__doc__, "contextual_sparsity.json")
    parser.add_argument("command", choices=("quality", "speed", "table"))
    parser.add_argument("--tokens", help="evaluation windows")
    parser.add_argument("--calibration-tokens", help="calibration windows")
    parser.add_argument("--windows", type=int, default=4, help="windows of 1,024 tokens (default 4)")
    parser.add_argument("--rows", nargs="+", default=["*"], help="globs of row names")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="rows of `speed` (default 1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--relu", action="store_true", help="`speed` of the random ReLU model too")
    parser.add_argument("--predictors", default="contextual-predictors", help="folder of the trained predictors")
    given = parser.parse_args()
    {"quality": quality, "speed": speed, "table": table}[given.command](given)
