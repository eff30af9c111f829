"""Speculative decoding on a GPU against what acceptance and the costs of its parts allow, for random models of the
sizes of Llama-3.1-8B and Llama-3.2-1B. Writes benchmarks/results/speculation_gpu.json.

    python benchmarks/speculation_gpu.py [--quick] [--output FILE]

The weights force the acceptance: attention and MLP add next to nothing to the residual stream (their cost is real), and
the output head answers token i with token next[i], far from any tie. The draft's head answers like the target's for a
share `a` of the tokens, so each drafted token is right with probability a, independently. Greedy output is known, and
every run is checked against it. `oracle` drafts cost nothing, `1B` drafts come from the draft model.

For each a, g (drafted tokens) and batch, the median of `REPEATS` runs: tokens/s of the steps in which every sequence
had room for g drafts, over those of the loop without a drafter (`speedup`), and over a plain decode step replayed as a
CUDA graph (`speedup_over_graph`). `allowed` is E / (v + g c): E the tokens per step of this run (`expected`: in
theory), v the time of the target's forward on g + 1 tokens and c that of the draft's on one token, both in plain steps
of the target, each measured alone. `of_allowed` is the share of it that is reached. `never right` rows have an adaptive
draft that is always wrong: the overhead. `beside transformers`: its assisted generation, whole calls at batch 1, beside
ours.

`--tiny` runs the same code on small sizes without a GPU: it tests the script, its times mean nothing, and the record
says so.
"""

import copy
import itertools
import statistics
import sys
import time
from pathlib import Path

import harness
import torch
from harness import spread
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_efficient import PagedCache, Speculation, enable_speculation, speculative_generate
from hf_efficient.evaluation import environment
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.base import Drafter


sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from oracle import Oracle  # noqa: E402


ACCEPTANCE, DEPTHS, BATCHES = (0.6, 0.8, 0.9), (3, 5, 7), (1, 4, 8, 16, 32, 64)
PROMPT, NEW, REPEATS = 256, 128, 3
_LLAMA = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, rope_theta=5e5)
SIZES = {
    "8B": dict(_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    "1B": dict(_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16),
}
TINY = dict(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=64)


class Clocked(Drafter):
    """Another drafter, and the tokens and seconds of each step in which every row had room for all its drafts."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.draws = drafter, False

    def check(self, model):
        self.drafter.check(model)
        self.max_tokens = self.drafter.max_tokens

    def begin(self, sequences, hidden=None):
        self.drafter.begin(sequences, hidden)
        self.steps, self.room, self.since = [], False, time.perf_counter()

    def propose(self, limits, nodes):
        self.room = min(limits) >= self.max_tokens
        return self.drafter.propose(limits, nodes)

    def accept(self, tokens, hidden=None):
        self.drafter.accept(tokens, hidden)
        now = time.perf_counter()
        if self.room:
            self.steps.append((sum(map(len, tokens)), now - self.since))
        self.room, self.since = False, now

    def select(self, rows):
        self.drafter.select(rows)


def model_of(size: dict, device: str):
    """Random weights in bf16; what `answering` leaves of them decides nothing."""
    config = LlamaConfig(**size, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(1e-2)
    return model


@torch.no_grad()
def answering(model, following: torch.Tensor):
    """Makes the model say `following[i]` after token i."""
    head = torch.zeros_like(model.lm_head.weight)
    model.lm_head.weight.copy_(head.index_add_(0, following, model.get_input_embeddings().weight))
    return model


def synchronized() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def forward_seconds(model, prompts: torch.Tensor, width: int, graph: bool = False) -> float:
    """Of one forward of `width` tokens a row after the prompts: the median of `REPEATS` times 20. graph: compiled, and
    its CUDA graph replayed."""
    rows, steps = len(prompts), 20
    blocks = rows * -(-(prompts.shape[1] + (REPEATS + 1) * steps * width) // 16)
    cache = PagedCache(model.config, num_blocks=blocks)
    model(prompts, past_key_values=cache, logits_to_keep=1)
    tokens = prompts[:, :width].clone()
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if graph else model.forward
    times = []
    for _ in range(REPEATS + 1):
        start = synchronized()
        for _ in range(steps):
            with cache.decode_step(width) as position_ids:
                forward(tokens, position_ids=position_ids, past_key_values=cache)
        times.append((synchronized() - start) / steps)
    return statistics.median(times[1:])


class Bench:
    """The two models, what has been measured of them, and the record."""

    def __init__(self, options):
        self.options, self.device = options, "cpu" if options.tiny else "cuda"
        sizes = {
            name: dict(TINY, num_hidden_layers=2 - (name == "1B")) if options.tiny else SIZES[name] for name in SIZES
        }
        self.target, self.draft = (model_of(sizes[name], self.device) for name in ("8B", "1B"))
        self.vocabulary = self.target.config.vocab_size
        circle = torch.randperm(self.vocabulary, device=self.device)
        self.following = torch.empty_like(circle)
        self.following[circle] = circle.roll(-1)
        answering(self.target, self.following)
        self.stock = copy.copy(self.target)  # shares everything but the class
        enable_speculation(self.target)
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0
        self.results, self.costs = [], {}

    def expected(self, batch: int) -> torch.Tensor:
        """Random prompts of `batch` rows and what the target says to them."""
        generator = torch.Generator(self.device).manual_seed(batch)
        shape = (batch, PROMPT)
        tokens = [torch.randint(self.vocabulary, shape, generator=generator, device=self.device)]
        for _ in range(NEW):
            tokens.append(self.following[tokens[-1][:, -1:]])
        return torch.cat(tokens, 1)

    def set_acceptance(self, share: float) -> None:
        """The draft says what the target says after this share of the tokens, and another token after the rest."""
        right = torch.rand(self.vocabulary, device=self.device) < share
        answering(self.draft, torch.where(right, self.following, self.following[self.following]))

    def generate(self, model, batch: int, **options):
        """Returns the output, whether it is right, and the seconds of the call."""
        expected = self.expected(batch)
        prompts = expected[:, :PROMPT]
        start = synchronized()
        options |= dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        return output, torch.equal(output.sequences, expected), synchronized() - start

    def cost(self, model, batch: int, width: int, graph: bool = False) -> float:
        key = (model is self.draft, batch, width, graph)
        if key not in self.costs:
            self.costs[key] = forward_seconds(model, self.expected(batch)[:, :PROMPT], width, graph)
        return self.costs[key]

    def plain(self, batch: int) -> dict:
        """Tokens/s of the loop without a drafter, and of replayed CUDA graphs."""
        if ("plain", batch) not in self.costs:
            speeds = []
            for _ in range(REPEATS + 1):
                output, correct, _ = self.generate(self.target, batch, custom_generate=speculative_generate)
                speeds.append(batch * (NEW - 1) / seconds_of(output))
            self.costs["plain", batch] = {"loop": spread(speeds[1:]), "correct": correct}
            graph = None if self.options.tiny else self.cost(self.target, batch, 1, graph=True)
            self.costs["plain", batch]["graph"] = graph and batch / graph
        return self.costs["plain", batch]

    def measure(self, draft: str, acceptance: float, depth: int, batch: int) -> dict:
        speeds, gains, hosts, all_correct = [], [], [], True
        for repeat in range(REPEATS + 1):
            if draft == "oracle":
                drafter = Oracle(self.expected(batch), acceptance, depth, self.vocabulary)
                drafter.generator.manual_seed(repeat)
            else:
                self.draft.generation_config.num_assistant_tokens = depth
                drafter = AssistantDrafter(self.draft)
            clocked = Clocked(drafter)
            output, correct, _ = self.generate(self.target, batch, assistant_model=Speculation(clocked, adaptive=False))
            tokens, seconds = (sum(part) for part in zip(*clocked.steps))
            speeds.append(tokens / seconds)
            gains.append(tokens / len(clocked.steps) / batch)
            hosts.append(output.host_seconds / seconds_of(output))
            all_correct &= correct
        plain, step = self.plain(batch), self.cost(self.target, batch, 1)
        gain, speed = statistics.mean(gains[1:]), spread(speeds[1:])
        wider = self.cost(self.target, batch, depth + 1) / step
        drafted = 0.0 if draft == "oracle" else self.cost(self.draft, batch, 1) / step
        speedup, allowed = speed["median"] / plain["loop"]["median"], gain / (wider + depth * drafted)
        return {
            "tokens_per_s": speed,
            "tokens_per_step": gain,
            "expected": (1 - acceptance ** (depth + 1)) / (1 - acceptance),
            "v": wider,
            "c": drafted,
            "speedup": speedup,
            "speedup_over_graph": plain["graph"] and speed["median"] / plain["graph"],
            "allowed": allowed,
            "of_allowed": speedup / allowed,
            "host_share": statistics.median(hosts[1:]),
            "correct": all_correct and plain["correct"],
        }

    def never_right(self, batch: int) -> dict:
        self.draft.generation_config.num_assistant_tokens = 5
        adaptive = Speculation(AssistantDrafter(self.draft))
        runs = [self.generate(self.target, batch, assistant_model=adaptive) for _ in range(REPEATS + 1)]
        speed = spread([batch * (NEW - 1) / seconds_of(output) for output, _, _ in runs[1:]])
        plain = self.plain(batch)
        return {
            "tokens_per_s": speed,
            "speedup": speed["median"] / plain["loop"]["median"],
            "correct": all(correct for _, correct, _ in runs),
        }

    def beside_transformers(self) -> dict:
        self.draft.generation_config.num_assistant_tokens = 5
        ways = {"ours": (self.target, "flash_paged"), "transformers": (self.stock, "sdpa")}
        seconds, right = {name: [] for name in ways}, []
        for _ in range(REPEATS + 1):
            for name, (model, implementation) in ways.items():
                for part in (model, self.draft):
                    part.set_attn_implementation(implementation)
                _, correct, spent = self.generate(model, 1, assistant_model=self.draft)
                seconds[name].append(spent)
                right.append(correct)
        self.use_pages()
        speed = {name: spread([NEW / spent for spent in some[1:]]) for name, some in seconds.items()}
        return {
            "tokens_per_s": speed["ours"],
            "of_transformers": speed["transformers"],
            "speedup": speed["ours"]["median"] / speed["transformers"]["median"],
            "correct": all(right),
        }

    def use_pages(self) -> None:
        for model in (self.target, self.draft):
            model.set_attn_implementation("flash_paged")

    def record(self, case: dict, call) -> None:
        line = {**case, "ours": True}
        try:
            line |= call()
            text = f"{line['tokens_per_s']['median']:9.1f} tokens/s {line['speedup']:5.2f}"
            text += f"  {line['of_allowed']:.2f} of {line['allowed']:.2f}" if "allowed" in line else ""
            text += "" if line["correct"] else "  WRONG"
        except Exception as reason:  # too little memory, a build that lacks something
            line["failed"] = text = f"{type(reason).__name__}: {str(reason)[:200]}"
        self.results.append(line)
        print(f"{' '.join(str(value) for value in case.values()):32s} {text}", flush=True)
        self.write()

    def goals(self) -> list[dict]:
        good = [line for line in self.results if "failed" not in line and line["correct"]]
        drafted = [line for line in good if "of_allowed" in line]

        def extreme(choose, lines, key):
            return choose((line[key] for line in lines if line[key] is not None), default=None)

        def best(batch):
            some = [
                line for line in drafted if (line["draft"], line["acceptance"], line["batch"]) == ("1B", 0.8, batch)
            ]
            return extreme(max, some, "speedup_over_graph")

        host = extreme(max, drafted, "host_share")
        rows = [
            ("share of E / (v + g c) that is reached, the worst case", 0.90, extreme(min, drafted, "of_allowed")),
            ("share of a step that is not the host's, the worst case", 0.97, None if host is None else 1 - host),
            *(
                (f"over plain decoding by CUDA graphs, 1B draft, a = 0.8, batch {batch}", least, best(batch))
                for batch, least in ((8, 2.3), (32, 1.8), (64, 1.45))
            ),
            *(
                (f"{what}, the worst case", least, extreme(min, [x for x in good if x["draft"] == name], "speedup"))
                for what, name, least in (
                    ("over the plain loop with a draft that is never right", "never right", 0.98),
                    ("over transformers' assisted generation, batch 1", "beside transformers", 3.0),
                )
            ),
        ]
        return harness.goals(rows, not self.options.tiny)

    def write(self) -> None:
        report = {"environment": environment.describe(), "prompt": PROMPT, "new_tokens": NEW, "repeats": REPEATS}
        if self.options.tiny:
            report["warning"] = "tiny sizes without a GPU: no time here means anything"
        report |= {"goals": self.goals(), "results": self.results}
        harness.write(self.options.output, report)

    def run(self) -> int:
        accepted, depths, batches = ACCEPTANCE, DEPTHS, BATCHES
        if self.options.quick or self.options.tiny:
            accepted, depths, batches = (0.8,), (5,), (4,) if self.options.tiny else (1, 8, 32)
        self.use_pages()
        for acceptance in accepted:
            self.set_acceptance(acceptance)
            for draft, depth, batch in itertools.product(("oracle", "1B"), depths, batches):
                case = dict(draft=draft, acceptance=acceptance, depth=depth, batch=batch)
                self.record(case, lambda case=case: self.measure(**case))
        self.set_acceptance(0.8)
        self.record(dict(draft="beside transformers", batch=1), self.beside_transformers)
        self.set_acceptance(0.0)
        for batch in batches:
            self.record(dict(draft="never right", batch=batch), lambda batch=batch: self.never_right(batch))
        harness.print_goals(self.goals())
        return int(any("failed" in line or not line["correct"] for line in self.results))


def seconds_of(output) -> float:
    """After the prompt."""
    return output.draft_seconds + output.verify_seconds + output.host_seconds


def main() -> int:
    global PROMPT, NEW, REPEATS
    parser = harness.parser(__doc__, "speculation_gpu.json")
    parser.add_argument("--quick", action="store_true", help="a = 0.8, g = 5, batches of 1, 8 and 32")
    parser.add_argument("--tiny", action="store_true", help="small sizes without a GPU: tests the script")
    options = parser.parse_args()
    if options.tiny:
        PROMPT, NEW, REPEATS = 12, 24, 1
    else:
        harness.need_gpu("speculation_gpu")
    torch.manual_seed(0)
    return Bench(options).run()


if __name__ == "__main__":
    sys.exit(main())
