"""Where does the time of one decoded token go on a CPU, in stock transformers and in ours?

    python benchmarks/cpu_profile.py [--prompt 32 1024] [--batch 1] [--tokens 128] [--threads 2]
        [--ways NAME ...] [--output FILE]

SmolLM2-135M-Instruct, greedy; medians over the steps after the first ones, in microseconds per step. Writes
benchmarks/results/cpu_profile.json and prints the tables.

Ours is timed at the borders of the loop > `RaggedModel` > `CapturedForward` > replay. At every other token the replay
runs in pieces (runs of instructions of one kind) with a clock between them; the time of an empty piece is subtracted,
and the other tokens give the time of a whole replay. Weights are read from where a real token finds them. The rest
between the pieces' sum and the whole replay is the disturbance by the clocks.

Stock: one generation is timed at the borders of the model's forward. Another runs under torch.profiler, whose times of
operators (without their children) are grouped; the remainder of the forward is Python and dispatch.
"""

import ctypes
import functools
import itertools
import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager

import harness
import torch
from cpu_generate_ways import STOCK, WAYS
from transformers.cache_utils import DynamicLayer

from hf_efficient.evaluation import environment, samples
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay.captured_forward import CapturedForward
from hf_efficient.kernels.replay import recorder
from hf_efficient.kernels.replay.instructions import OPS, Instruction
from hf_efficient.kernels.replay.recorder import Capture


FIRST = 16  # tokens that are not counted: the forwards are captured while they are generated
PROFILED = 16  # tokens under torch.profiler
OURS = ("ours int4", "ours int4, int8 head", "ours int4, int8 head, int8 inputs")
NAMES = {number: name for name, number in OPS.items()}
PRODUCTS = ("LINEAR", "DENSE")
KINDS = dict.fromkeys(PRODUCTS, "matrix products") | {
    "CALL": "attention, its pages appended",
    "ROWS": "embedding",
    "ROTARY": "rotary embedding",
    **dict.fromkeys(("RMS_NORM", "MEAN", "RSQRT"), "norms"),
    **dict.fromkeys(("GATED", "RELU", "SILU", "GELU", "GELU_TANH", "TANH", "SIGMOID"), "activations"),
}


class Tokens:
    """A stopping criterion that ends the account of each token: `accounts` are name -> seconds, `whole` the token."""

    def __init__(self):
        self.accounts, self.now, self.last = [], defaultdict(float), time.perf_counter()

    def __call__(self, input_ids, scores, **kwargs):
        now = time.perf_counter()
        self.accounts.append({**self.now, "whole": now - self.last})
        self.now.clear()
        self.last = now
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool)

    def medians(self, only=None) -> dict[str, float]:
        """Microseconds by name, of the accounts for which `only` holds."""
        counted = [account for account in self.accounts[FIRST:] if only is None or only(account)]
        names = dict.fromkeys(name for account in counted for name in account)
        return {name: statistics.median(a.get(name, 0.0) for a in counted) * 1e6 for name in names}


@contextmanager
def replaced(owner, name: str, make):
    """`owner.name` is `make(what it was)` for a while."""
    old = getattr(owner, name)
    setattr(owner, name, functools.wraps(old)(make(old)))
    try:
        yield
    finally:
        setattr(owner, name, old)


def timing(tokens: Tokens, label: str):
    def make(call):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                tokens.now[label] += time.perf_counter() - start

        return timed

    return make


def generate(model, ids: torch.Tensor, new: int, tokens: Tokens) -> None:
    options = dict(max_new_tokens=new, do_sample=False, stopping_criteria=[tokens])
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def pieces_of(step) -> list[tuple[str, int, int]]:
    """(kind, address, count) of the runs of instructions of one kind in a step of a capture."""
    (instructions,) = step.args
    address, names = ctypes.addressof(instructions), [NAMES[instruction.op] for instruction in instructions]
    last_product = max((place for place, name in enumerate(names) if name in PRODUCTS), default=None)
    kinds = [KINDS.get(name, "residuals, other elementwise") for name in names]
    if last_product is not None:
        kinds[last_product] = "output head"
    pieces, first, size = [], 0, ctypes.sizeof(Instruction)
    for kind, run in itertools.groupby(kinds):
        length = len(list(run))
        pieces.append((kind, address + first * size, length))
        first += length
    return pieces


def in_pieces(tokens: Tokens):
    """A replay that notes how long it took, and at every other token how long each kind of piece."""
    interpret, found = recorder.interpreter(), {}
    empty = []
    for _ in range(1000):
        start = time.perf_counter()
        interpret(0, 0)
        empty.append(time.perf_counter() - start)
    empty = statistics.median(empty)

    def make(replay):
        def replaying(self):
            if len(tokens.accounts) % 2:
                return timing(tokens, "replay")(replay)(self)
            torch.get_num_threads()
            for step in self._steps:
                if getattr(step, "func", None) is not recorder._interpret:
                    start = time.perf_counter()
                    step()
                    tokens.now["other operators, called"] += time.perf_counter() - start
                    continue
                for kind, address, count in found.get(id(step)) or found.setdefault(id(step), pieces_of(step)):
                    start = time.perf_counter()
                    refused = interpret(address, count)
                    tokens.now[kind] += time.perf_counter() - start - empty
                    assert not refused
            return self.output

        return torch.no_grad()(replaying)

    return make


def profile_ours(model, ids: torch.Tensor, new: int) -> dict[str, float]:
    """Microseconds of a token by what they go to."""
    generate(model, ids, new, Tokens())  # captures
    tokens = Tokens()
    borders = {
        "captured": (CapturedForward, "__call__"),
        "ragged": (RaggedModel, "__call__"),
        "rewind": (RaggedModel, "rewind"),
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(Capture, "replay", in_pieces(tokens)))
        for label, border in borders.items():
            stack.enter_context(replaced(*border, timing(tokens, label)))
        generate(model, ids, new, tokens)
    found = tokens.medians(lambda account: "replay" in account)
    parts = tokens.medians(lambda account: "replay" not in account)
    if "replay" not in found:
        raise RuntimeError("nothing was replayed: is there a C++ compiler, and AVX-512?")
    parts = {name: value for name, value in parts.items() if name not in (*borders, "whole")}
    return {
        **dict(sorted(parts.items(), key=lambda part: -part[1])),
        "replay, beyond its pieces": found["replay"] - sum(parts.values()),
        "cache bookkeeping": found["captured"] - found["replay"] + found["rewind"],
        "Python around the forward": found["ragged"] - found["captured"],
        "Python in generate": found["whole"] - found["ragged"] - found["rewind"],
        "whole": found["whole"],
    }


def profile_stock(model, ids: torch.Tensor, new: int) -> dict[str, float]:
    """Microseconds of a token by what they go to."""
    generate(model, ids, FIRST, Tokens())
    tokens = Tokens()
    with replaced(type(model), "forward", timing(tokens, "forward")):
        generate(model, ids, new, tokens)
    found = tokens.medians()

    def named(label):
        def make(call):
            def recorded(*args, **kwargs):
                with torch.profiler.record_function(label):
                    return call(*args, **kwargs)

            return recorded

        return make

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    class Window(Tokens):
        def __call__(self, input_ids, scores, **kwargs):
            result = super().__call__(input_ids, scores, **kwargs)
            if len(self.accounts) == FIRST:
                profiler.start()
            elif len(self.accounts) == FIRST + PROFILED:
                profiler.stop()
            return result

    inside = (replaced(type(model), "forward", named("forward")), replaced(DynamicLayer, "update", named("cache")))
    with inside[0], inside[1]:
        generate(model, ids, FIRST + PROFILED, Window())
    groups = defaultdict(float)
    for event in profiler.events():
        above, parent = set(), event.cpu_parent
        while parent is not None:
            above.add(parent.name)
            parent = parent.cpu_parent
        if "forward" in above:
            groups[stock_kind(event.name, above)] += event.self_cpu_time_total / PROFILED
    return {
        **dict(sorted(groups.items(), key=lambda group: -group[1])),
        "Python in the model": found["forward"] - sum(groups.values()),
        "Python in generate": found["whole"] - found["forward"],
        "whole": found["whole"],
    }


def stock_kind(name: str, above: set[str]) -> str:
    if "cache" in above or name == "cache":
        return "cache"
    if "attention" in name or any("attention" in each for each in above):
        return "attention"
    if name in ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::bmm", "aten::t", "aten::transpose"):
        return "matrix products"
    return "norms, activations, other elementwise"


def table(records: list[dict]) -> str:
    """One row a part and one column a record: microseconds, and their share of the token."""
    parts = list(dict.fromkeys(part for record in records for part in record["microseconds"] if part != "whole"))
    heads = [f"{record['way']}, {record['batch']} × {record['prompt']}" for record in records]
    lines = [f"| microseconds a step | {' | '.join(heads)} |", "|---" * (len(records) + 1) + "|"]
    for part in [*parts, "whole"]:
        cells = []
        for record in records:
            value, whole = record["microseconds"].get(part), record["microseconds"]["whole"]
            cells.append("" if value is None else f"{value:,.0f} ({value / whole:.0%})")
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__, "cpu_profile.json")
    parser.add_argument("--prompt", type=int, nargs="+", default=[32, 1024])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=[STOCK, *OURS], choices=[STOCK, *OURS])
    options = parser.parse_args()
    if options.tokens <= FIRST + 1:
        parser.error(f"--tokens {options.tokens}: the first {FIRST} are not counted, it takes more than {FIRST + 1}")
    torch.set_num_threads(options.threads)
    folder, records = samples.sample_model(), []
    needed = options.batch * max(options.prompt)
    text = harness.tokenizer()(samples.sample_text()[: 20 * needed], return_tensors="pt")["input_ids"]
    if text.shape[1] < needed:
        parser.error(f"--batch {options.batch}: the sample text has {text.shape[1]} tokens, {needed} are needed")
    for way in options.ways:
        model = WAYS[way](folder)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        for prompt in options.prompt:
            measure = profile_stock if way == STOCK else profile_ours
            rows = [text[0, row * prompt :][:prompt] for row in range(options.batch)]
            found = measure(model, torch.stack(rows), options.tokens)
            rounded = {part: round(value, 1) for part, value in found.items()}
            records.append({"way": way, "batch": options.batch, "prompt": prompt, "microseconds": rounded})
    result = {
        "question": "where the time of one decoded token goes on a CPU",
        "model": samples.SAMPLE_MODEL,
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "results": records,
    }
    harness.write(options.output, result)
    print(table(records))


if __name__ == "__main__":
    main()
