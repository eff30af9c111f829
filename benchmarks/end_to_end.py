"""What does tuning a compressed model as a whole gain (`CalibrationConfig(minutes=...)`)?

    python benchmarks/end_to_end.py FOLDER [--minutes 10] [--windows 8] [--batches 32] [--tokens FILE]
        [--calibration-tokens FILE] [--output FILE]

FOLDER: SmolLM2-135M-Instruct as a row of benchmarks/quality.py made it, saved. Its linears, norms and biases are tuned
on the next-token distributions of the bfloat16 model, on `--batches` of two calibration windows. Perplexity before and
after is that of the first windows of benchmarks/quality.py; the difference is paired by window.
"""

import time
from types import SimpleNamespace

import harness
import torch

import hf_efficient
from hf_efficient.calibration.end_to_end import EndToEnd
from hf_efficient.calibration.refine import share_factors, tuned_weight
from hf_efficient.evaluation import environment, perplexity
from hf_efficient.layers import EfficientLinear, compress_linear


class Dense:
    """`hf_efficient.calibration.teacher.Teacher` where the original model is in memory, too."""

    def __init__(self, dense, model, batches: list[dict]):
        self.dense, self.followed = dense, SimpleNamespace(model=model, batches=batches)

    @torch.no_grad()
    def logits(self, batch: int) -> torch.Tensor:
        return self.dense(**self.followed.batches[batch]).logits


def main() -> None:
    parser = harness.parser(__doc__, "end_to_end.json")
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    options = parser.parse_args()
    hf_efficient.register()
    dense, model = harness.load(), harness.load(options.folder)
    evaluated = harness.windows(options.tokens, "evaluation", options.windows, 1024)
    text = harness.windows(options.calibration_tokens, "calibration", 2 * options.batches, 512)
    before = perplexity.negative_log_likelihood(model, evaluated)
    originals = dict(dense.named_modules())
    linears = {name: module for name, module in model.named_modules() if isinstance(module, EfficientLinear)}
    tuned = {name: tuned_weight(originals[name], m.format, m.canonical()) for name, m in linears.items()}
    share_factors(tuned)
    batches = [{"input_ids": pair} for pair in text.split(2)]
    training, start = EndToEnd(Dense(dense, model, batches), tuned, options.minutes, None), time.process_time()
    better = training.run()
    cpu_seconds = time.process_time() - start
    if better:
        for name, weight in tuned.items():
            model.set_submodule(name, compress_linear(originals[name], weight.format, weight.tensors()))
    after = perplexity.negative_log_likelihood(model, evaluated) if better else before
    difference = after - before
    record = {
        "environment": environment.describe(),
        "minutes": options.minutes,
        "cpu_seconds": cpu_seconds,
        "steps": training.steps,
        "tokens_a_step": 1024,
        "windows": options.windows,
        "perplexity": {"before": perplexity.perplexity(before), "after": perplexity.perplexity(after)},
        "nll_difference": difference.mean().item(),
        "nll_difference_standard_error": (difference.std() / len(difference) ** 0.5).item(),
    }
    harness.write(options.output, harness.rounded(record))
    print(record["perplexity"], training.steps, "steps", f"{cpu_seconds:.0f} CPU s")


if __name__ == "__main__":
    main()
