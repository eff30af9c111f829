"""What does rounding the inputs of linears to float8 E4M3 cost alone, the weights staying as they are?

    python benchmarks/fp8_inputs.py [--tokens FILE] [--calibration-tokens FILE] [--output FILE]

What a choice of fp8 weights starts from: SmolLM2-135M-Instruct in bfloat16, all linears but the head, a scale a token,
and 0, 64 or 128 columns of the inputs left in 16 bits, those of the largest share in the output on four windows of the
calibration text. Texts and figures as in quality.py.
"""

import harness
import torch
from quality import LENGTH, WINDOWS

from hf_efficient.evaluation import environment, perplexity


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
    parser = harness.parser(__doc__, "fp8_inputs.json")
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    options = parser.parse_args()
    windows = harness.windows(options.tokens, "evaluation", WINDOWS["wikipedia"], LENGTH)
    calibration = harness.windows(options.calibration_tokens, "calibration", CALIBRATION_WINDOWS, 512)
    model = harness.load()
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
        rows[f"{count} columns in 16 bits"] = harness.score(nll, base)
        print(count, rows[f"{count} columns in 16 bits"], flush=True)
    result = {"question": " ".join(__doc__.split("\n")[0].split()), "environment": environment.describe(), "rows": rows}
    harness.write(options.output, result)


if __name__ == "__main__":
    main()
