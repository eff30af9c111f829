"""What does rounding the inputs of linears to float8 E4M3 cost alone, the weights staying as they are?

    python benchmarks/fp8_inputs.py [--tokens FILE] [--calibration-tokens FILE] [--output FILE]

What a choice of fp8 weights starts from: SmolLM2-135M-Instruct in bfloat16, all linears but the head, a scale a
token, and 0, 64 or 128 columns of the inputs left in 16 bits, those of the largest share in the output on four windows of the
calibration text. Texts and figures as in quality.py.
"""

import argparse
import json
from pathlib import Path

import torch
from quality import LENGTH, WINDOWS, read_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient.evaluation import environment, perplexity, samples


RESULTS = Path(__file__).parent / "results" / "fp8_inputs.json"
COLUMNS, CALIBRATION_WINDOWS = (0, 64, 128), 4


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] to float8 E4M3 and back, a scale a row."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-20) / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def mean_squares(linears: dict, model, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    sums = {name: torch.zeros(linear.in_features) for name, linear in linears.items()}

    def see(name, x) -> None:
        sums[name] += x.float().square().flatten(0, -2).sum(0)

    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name, linear in linears.items()
    ]
    perplexity.negative_log_likelihood(model, windows, progress=False)
    for each in hooks:
        each.remove()
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(samples.sample_model())
    windows, calibration = (
        read_tokens(path)[:count] if path else perplexity.windows(tokenizer, samples.sample_text(split), count, length)
        for path, split, count, length in (
            (options.tokens, "evaluation", WINDOWS["wikipedia"], LENGTH),
            (options.calibration_tokens, "calibration", CALIBRATION_WINDOWS, 512),
        )
    )
    model = AutoModelForCausalLM.from_pretrained(samples.sample_model(), dtype=torch.bfloat16)
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    squares = mean_squares(linears, model, calibration)
    base = perplexity.negative_log_likelihood(model, windows)
    rows = {"bf16": {"perplexity": perplexity.perplexity(base)}}
    for count in COLUMNS:
        hooks = []
        for name, linear in linears.items():
            share = squares[name] * linear.weight.float().square().sum(0)
            kept = torch.zeros(linear.in_features, dtype=torch.bool)
            kept[share.topk(count).indices] = True
            hooks.append(
                linear.register_forward_pre_hook(
                    lambda _, args, kept=kept: torch.where(kept, args[0], rounded(args[0].masked_fill(kept, 0)))
                )
            )
        nll = perplexity.negative_log_likelihood(model, windows)
        for hook in hooks:
            hook.remove()
        difference, error = perplexity.paired_difference(nll, base)
        rows[f"{count} columns in 16 bits"] = {
            "perplexity": perplexity.perplexity(nll),
            "nll_difference": difference,
            "nll_difference_standard_error": error,
        }
        print(count, rows[f"{count} columns in 16 bits"], flush=True)
    result = {"question": " ".join(__doc__.split("\n")[0].split()), "environment": environment.describe(), "rows": rows}
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
