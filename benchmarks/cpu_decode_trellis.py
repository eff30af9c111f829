"""Do trellis codes decode as fast on a CPU as a grid of the same bits?

    python benchmarks/cpu_decode_trellis.py [--bits 2 3] [--tokens 96] [--repeats 5] [--threads 2] [--output FILE]

SmolLM2-135M-Instruct, batch 1, greedy, after a prompt of 32 tokens: grids have groups of 64, trellises a scale a
row and rotated inputs, but for the output projections of attention, whose rotation calibration folds. Codes are random,
on which the speed does not depend. The models take turns. Tokens a second: the time of `tokens` more new ones. Parts
are those of each turn.
"""

import os
import time
from unittest import mock

import harness
import torch

from hf_efficient.evaluation import environment
from hf_efficient.formats.trellis import TrellisFormat


GOAL = 0.85  # of the speed of the grid


def random_codes(self, weight):
    shape = self.shapes(*weight.shape)["qweight"]
    return {"qweight": torch.randint(0, 256, shape, dtype=torch.uint8), "scale": self.scale(weight)}


def models(bits: list[int]) -> dict:
    """Name -> model."""
    import transformers

    import hf_efficient

    hf_efficient.register()
    transformers.logging.set_verbosity_error()
    folded, made = {"o_proj": {"rotate": False}}, {}
    for number in bits:
        grid = hf_efficient.WeightOnlyConfig(bits=number, group_size=64, method="rtn", int8_on_cpu=False)
        trellis = hf_efficient.WeightOnlyConfig(bits=number, codebook="trellis", method="rtn", overrides=folded)
        with mock.patch.object(TrellisFormat, "round", random_codes):
            made |= {f"int{number}": harness.load(quantization_config=grid)}
            made |= {f"trellis {number}": harness.load(quantization_config=trellis)}
    return made


def main() -> None:
    parser = harness.parser(__doc__, "cpu_decode_trellis.json")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made, times = models(options.bits), {}
    prompt = torch.randint(0, 40000, (1, 32), generator=torch.Generator().manual_seed(0))
    for repeat in range(options.repeats + 1):  # the first captures
        for name, model in made.items():
            seconds = []
            for new in (1, 1 + options.tokens):
                start = time.perf_counter()
                model.generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
                seconds.append(time.perf_counter() - start)
            if repeat:
                times.setdefault(name, []).append(options.tokens / (seconds[1] - seconds[0]))
    speeds = {name: harness.spread(values) for name, values in times.items()}
    parts = {
        f"trellis {bits} beside int{bits}": harness.spread(
            [own / grid for own, grid in zip(times[f"trellis {bits}"], times[f"int{bits}"])]
        )
        for bits in options.bits
    }
    record = {
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "repeats": options.repeats,
        "tokens_a_second": speeds,
        "parts": parts,
        "goals": harness.goals([(name, GOAL, part["median"]) for name, part in parts.items()], True),
    }
    harness.write(options.output, harness.rounded(record))
    harness.print_goals(record["goals"])


if __name__ == "__main__":
    main()
