"""How long does a step of quantization-aware training take, with and without CUDA graphs and our fake quantization?

    python benchmarks/training_steps.py [--device cuda] [--start FOLDER] [--windows 4 16 32] [--steps 24]
        [--output FILE]

SmolLM2 in 2 bits (FOLDER: a checkpoint to start from instead) learns from the dense model, by `recover`, from windows
of 512 random tokens. Ways: "eager", one kernel after the other, weights rounded by torch's operators; "kernel", rounded
by one kernel of ours in the forward and one in the backward; "graph" and "both" on CUDA devices, where a step is one
launch. A record has the median, the fastest and the slowest step after the first six, in seconds, and tokens/s by the
median. All ways are measured with the fewest windows, and the last one with more, too.
"""

import statistics
import time
from pathlib import Path

import harness
import torch
from transformers import TrainerCallback

import hf_efficient
from hf_efficient.compression.recovery import coded_weights, progress, trainer
from hf_efficient.evaluation import environment


WAYS = {"eager": (False, False), "kernel": (True, False), "graph": (False, True), "both": (True, True)}
FIRST = 6  # steps that compile, capture and allocate


class Clock(TrainerCallback):
    """Notes when each step ended: the loss is read in every step, so its kernels have run."""

    def __init__(self):
        self.times = []

    def on_step_end(self, *arguments, **named):
        self.times.append(time.perf_counter())


def measure(way: str, start: Path | None, teacher, windows: int, steps: int) -> dict:
    """One record."""
    has_kernel, has_graph = WAYS[way]
    own = coded_weights.CodedWeight.quantizer, trainer.is_graphable
    config = {"quantization_config": hf_efficient.WeightOnlyConfig(bits=2, group_size=64, quality="fast")}
    model = harness.load(start, device_map=teacher.device, **({} if start else config))
    tokens = torch.randint(5, model.config.vocab_size, (12 * windows, 512), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    try:
        if not has_kernel:
            coded_weights.CodedWeight.quantizer = lambda self, dtype: (None, 0.0)
        if not has_graph:
            trainer.is_graphable = lambda model, teacher: False
        hf_efficient.recover(model, teacher, tokens, steps=steps, batch_size=windows, callbacks=[clock])
    finally:
        coded_weights.CodedWeight.quantizer, trainer.is_graphable = own
    seconds = [after - before for before, after in zip(clock.times[FIRST - 1 :], clock.times[FIRST:])]
    median = statistics.median(seconds)
    spread = {"fastest": min(seconds), "slowest": max(seconds)}
    return {"way": way, "windows": windows, "seconds": median, **spread, "tokens_per_second": 512 * windows / median}


def main() -> None:
    """Measures all ways in turn."""
    parser = harness.parser(__doc__, "training_steps.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--start", type=Path, help="folder of a compressed SmolLM2")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 16, 32], help="of 512 tokens in a step")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    if options.steps < FIRST + 2 or min(options.windows) < 1:
        parser.error(f"--steps {options.steps} --windows {options.windows}: at least {FIRST + 2} steps and 1 window")
    progress.TIMES_MEASURED = 1
    teacher, records = harness.load(device_map=options.device), []
    for windows in sorted(options.windows):
        names = [way for way, (_, has_graph) in WAYS.items() if not has_graph or teacher.device.type == "cuda"]
        for way in names if windows == min(options.windows) else names[-1:]:
            records.append(measure(way, options.start, teacher, windows, options.steps))
            print(records[-1], flush=True)
    harness.write(options.output, {"environment": environment.describe(), "records": records})


if __name__ == "__main__":
    main()
