"""How fast is generate() on a CPU: ours beside stock transformers, other quantizations and llama.cpp.

    python benchmarks/cpu_generate.py [--quick] [--models smollm2 1b] [--batch 1 8] [--prompt 32 512 1024 copying fresh]
        [--ways GLOB ...] [--repeats 3] [--patience 2] [--threads 2] [--seconds S] [--resume] [--output FILE]
    python benchmarks/cpu_generate.py --table [--output FILE]         # what has been measured, as Markdown

SmolLM2-135M-Instruct and a random Llama of a 1B model's shape; greedy, fixed length, no end of sequence. Every way
(`WAYS`) has a process of its own, which loads the model once and answers one measurement at a time. The ways take
turns. Those that fail are in the results with the reason.

A call measures the time to the first token (from which `prefill_tokens_per_s` follows) and the tokens/s of all
sequences after it, with a stopping criterion that records when tokens come; ours loses a little more time to it than
others. The criterion ends a call `--patience` seconds after its first token, so slow ways have fewer than 128
`new_tokens`. A call of 8 tokens warms each case up (`warming_s`: compilation, capture). Then come `--repeats` calls, or
as many as fit into 3 times the patience (peers: 2). A way is left out where its prefill would take 10 times the
patience (peers: 2), estimated from its earlier prompts. So is batch 8, prompt 1,024 of the 1B model: `--models 1b
--batch 8 --prompt 1024 --patience 10` measures it. The 1B model has fewer ways unless `--ways` says which.

`--seconds`: no case begins later than that; one takes up to two minutes. `--resume` keeps the rows of the output, which
must be of this commit and these threads, and measures what is missing.

Memory: `peak_memory_bytes` is the process's resident peak in the case's calls, with a mapped checkpoint;
`anonymous_bytes` the part that is no file's, afterwards; `loading_peak_bytes` the peak of loading. Of a fresh
process `peak_memory_bytes` is the peak of all it did.

- `--prompt`: tokens of Wikipedia; 512 measures the first token only. "copying": four of the copying prompts of
  speculation.py, one by one up to the end of sequence; a call is all four.
- "fresh process": seconds from the start of a process (imports, loading, on a warm file cache) to the first token of
  32, and to the last. "saved" loads a checkpoint that was quantized before; "cold" has an empty `$HF_HOME`, so the
  kernels are compiled.
- "stock compiled": transformers' static cache and its own compilation, which needs a private flag on a CPU.
- "int8 inputs": `int8_on_cpu=True`, else "auto"; llama.cpp rounds inputs, too. torchao's int4 has no CPU path.
- llama.cpp: llama-cpp-python on the GGUF of the sample model (Q4_1 layers, Q8_0 embedding and head), by its low-level
  calls and numpy's argmax, batch 1. "int4, int8 head" has the same sizes; "int4" leaves the head in bfloat16,
  "int4, int4 head" has 4 bits there, too; "the GGUF" is that file adopted, with its weights as they are and a head in
  bfloat16, so it generates what llama.cpp does.

Peers may be installed in a folder on PYTHONPATH (pip install --target FOLDER --no-deps bitsandbytes torchao
optimum-quanto). llama.cpp is built from source for this CPU, which takes ten minutes on two cores:

    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF" \\
        pip install --target FOLDER --no-deps --no-binary llama-cpp-python llama-cpp-python
    pip install --target FOLDER --no-deps diskcache
"""

import fnmatch
import importlib.metadata
import json
import os
import statistics
import tempfile
import time

import harness
import torch
from cpu_generate_goals import LIKE, LOOKUP, SAME, SAVED, SMALLEST, goals
from cpu_generate_models import MODELS, Texts, folder_of
from cpu_generate_ways import COMPILED, STOCK, WAYS, Worker
from harness import rounded

from hf_efficient.evaluation import environment


NEW, WARM = 128, 8
FRESH_TOKENS, FRESH_CALLS = 32, 2
PEERS = ("llama-cpp-python", "bitsandbytes", "torchao", "optimum-quanto")
PROMPTS = ("32", "512", "1024", "copying", "fresh")
COPYING = ("llama.cpp", SAME, SAME + LOOKUP, LIKE, LIKE + LOOKUP, LIKE + ", int8 inputs" + LOOKUP, "ours int4" + LOOKUP)
OF_1B = (STOCK, "ours int8", LIKE, f"{LIKE}, int8 inputs", "bitsandbytes nf4", "torchao int8", "quanto int8")


def is_peer(way: str) -> bool:
    return not way.startswith(("stock", "ours", "llama.cpp"))


class Benchmark:
    """The rows of a run, written to `options.output` as they come."""

    def __init__(self, options, earlier: dict | None = None):
        earlier = earlier or {}
        self.options, self.rows, self.absent = options, earlier.get("results", []), earlier.get("absent", [])
        self.done = {(row["model"], row["way"], row["batch"], row["prompt"]) for row in self.rows}
        self.end = time.perf_counter() + (options.seconds or float("inf"))
        self.new = 16 if options.quick else NEW

    def measure(self, model: str, folder: str) -> None:
        options = self.options
        globs = options.ways or (OF_1B if model == "1b" else ["*"])
        workers, known = {}, {(line["model"], line["way"]) for line in self.absent}
        for way in harness.matching(WAYS, globs):
            if (model, way) in known or self.is_late():
                continue
            workers[way] = worker = Worker(way, folder, options.threads)
            worker.loading = worker.read()
            if "failed" in worker.loading:
                self.absent.append({"model": model, "way": way, "reason": worker.loading["failed"]})
                print(f"{model}, {way}: {worker.loading['failed']}", flush=True)
                del workers[way]
        texts = Texts(model, folder)
        prompts = [int(prompt) for prompt in options.prompt if prompt.isdigit()]
        for batch in options.batch:
            for prompt in prompts if batch == options.batch[0] else [prompt for prompt in prompts if prompt != 512]:
                new = 1 if prompt == 512 else self.new
                asks = [dict(ids=texts.rows(batch, prompt), new=new, end=None)]
                self.case(model, batch, prompt, workers, {way: way for way in workers}, asks)
            if "fresh" in options.prompt and model != "1b" and batch == options.batch[0]:
                self.fresh(model, folder, texts, workers)
        if "copying" in options.prompt and texts.tokenizer is not None:
            prompts = texts.copying()[:: 8 if options.quick else 2]
            asks = [dict(ids=[ids], new=self.new, end=texts.tokenizer.eos_token_id) for ids in prompts]
            names = {name: name.removesuffix(LOOKUP) for name in COPYING}
            self.case(model, 1, "copying", workers, {n: way for n, way in names.items() if way in workers}, asks)
        for worker in workers.values():
            worker.close()

    def is_late(self) -> bool:
        return time.perf_counter() > self.end

    def case(self, model: str, batch: int, prompt, workers: dict, names: dict[str, str], asks: list[dict]) -> None:
        """Rows for `names` (name -> way): calls of all `asks`, in turns."""
        names = {name: way for name, way in names.items() if (model, name, batch, prompt) not in self.done}
        if self.is_late():
            names = {}
        options, calls, why = self.options, {name: [] for name in names}, {}
        size = sum(len(ids) for ask in asks for ids in ask["ids"])
        for name, way in names.items():
            seconds = size / workers[way].rate if workers[way].rate else 0
            if way == "llama.cpp" and batch > 1:
                why[name] = {"left_out": "one sequence only"}
            elif way == COMPILED and (batch, prompt) != (1, 32):
                why[name] = {"left_out": "every shape takes as long to compile"}
            elif is_peer(way) and prompt == 512:
                why[name] = {"left_out": "see the longer prompt"}
            elif seconds > options.patience * (2 if is_peer(way) else 10):
                why[name] = {"left_out": f"the prompt alone would take about {seconds:.0f} s"}
        spent, warming = dict.fromkeys(names, 0.0), {}
        for turn in range(-1, options.repeats):
            for name, way in names.items():
                if name in why or spent[name] > options.patience * (2 if is_peer(way) else 3):
                    continue
                warm, lookup = turn < 0, name.endswith(LOOKUP)
                limits = dict(stop=WARM if warm else self.new, patience=options.patience, warm=warm, lookup=lookup)
                start = time.perf_counter()
                answers = [workers[way].ask(**ask, **limits) for ask in asks]
                seconds = time.perf_counter() - start
                if failed := next((answer for answer in answers if "failed" in answer), None):
                    why[name] = failed
                elif warm:
                    warming[name] = seconds
                    if prompt != "copying":
                        workers[way].rate = max(workers[way].rate, size / answers[0]["first"])
                else:
                    spent[name] += seconds
                    calls[name].append(answers)
        for name, way in names.items():
            row = {"model": model, "way": name, "batch": batch, "prompt": prompt}
            if name in why:
                row |= why[name]
            else:
                row |= summary(calls[name], batch, size)
                row["warming_s"] = warming[name]
                row["loading_peak_bytes"] = workers[way].loading["loading_peak_bytes"]
                right = calls.get(STOCK)
                if right and name != STOCK:
                    row["tokens_as_stock"] = [agreeing(a["row"], b["row"]) for a, b in zip(calls[name][-1], right[-1])]
            self.add(row)

    def fresh(self, model: str, folder: str, texts, workers: dict) -> None:
        """Rows of processes that start, load and generate."""
        limits = dict(new=FRESH_TOKENS, stop=FRESH_TOKENS, patience=60)
        ask = dict(ids=texts.rows(1, 32), end=None, lookup=False, warm=False, **limits)
        with tempfile.TemporaryDirectory() as temporary:
            ways = [(way, way, folder, {}) for way in (STOCK, "llama.cpp", LIKE) if way in workers]
            for number, way in enumerate(way for way in (LIKE, SMALLEST) if way in workers):
                saved = f"{temporary}/saved{number}"
                if "failed" not in workers[way].ask(save=saved):
                    ways.append((f"{way}, saved", SAVED, saved, {}))
                    if way == LIKE:
                        ways.append((f"{way}, saved, cold", SAVED, saved, {"HF_HOME": f"{temporary}/home"}))
            ways = [] if self.is_late() else [w for w in ways if (model, w[0], 1, "fresh process") not in self.done]
            calls = {name: [] for name, *_ in ways}
            for _ in range(1 if self.options.quick else FRESH_CALLS):
                for name, way, where, environment in ways:
                    if environment and calls[name]:
                        continue  # no longer cold
                    worker = Worker(way, where, self.options.threads, **environment)
                    worker.send(**ask)
                    answer = worker.read()
                    answer = answer if "failed" in answer else worker.read()
                    worker.close()
                    calls[name].append(answer | {"started": worker.started})
        for name, answers in calls.items():
            row = {"model": model, "way": name, "batch": 1, "prompt": "fresh process", "calls": len(answers)}
            if failed := next((answer for answer in answers if "failed" in answer), None):
                self.add(row | failed)
                continue
            for key, at in (("first_token_s", "first_at"), (f"{FRESH_TOKENS}_tokens_s", "last_at")):
                row[key] = spread([answer[at] - answer["started"] for answer in answers], min)
            row["peak_memory_bytes"] = max(answer["peak_memory_bytes"] or 0 for answer in answers) or None
            self.add(row)

    def add(self, row: dict) -> None:
        """Writes the results anew."""
        self.rows.append(rounded(row))
        print(json.dumps(self.rows[-1]), flush=True)
        options = self.options
        result = {
            "question": "generate() on a CPU: prefill and decode in tokens/s, time to first token, memory",
            "environment": environment.describe(),
            "peers": {name: version(name) for name in PEERS},
            "threads": options.threads,
            "load_average": os.getloadavg(),
            "repeats": options.repeats,
            "goals": goals(self.rows, options.quick),
            "absent": self.absent,
            "results": self.rows,
        }
        if options.quick:
            result["warning"] = "a quick run: too few tokens and calls for its times to mean anything"
        partial = options.output.with_suffix(".partial")
        harness.write(partial, result)
        partial.replace(options.output)


def earlier(options, parser) -> dict:
    """The output of a run before, of the same commit and threads."""
    found = harness.read(options.output, {})
    now = {"commit": environment.describe()["commit"], "threads": options.threads}
    then = {"commit": found["environment"]["commit"], "threads": found["threads"]} if found else now
    if then != now:
        parser.error(f"--resume: {options.output} is of {then}, this run of {now}")
    return found


def summary(calls: list[list[dict]], batch: int, size: int) -> dict:
    """Measures of the calls of one way: each is a list of answers, `size` prompt tokens together."""
    first = [sum(answer["first"] for answer in call) for call in calls]
    found = {
        "calls": len(calls),
        "new_tokens": [len(answer["row"]) for answer in calls[-1]],
        "time_to_first_token_s": spread(first, min),
        "prefill_tokens_per_s": spread([size / seconds for seconds in first]),
    }
    decoded = [batch * sum(len(answer["row"]) - 1 for answer in call) for call in calls]
    if min(decoded):
        seconds = [sum(answer["decode"] for answer in call) for call in calls]
        found["decode_tokens_per_s"] = spread([tokens / time for tokens, time in zip(decoded, seconds)])
    found["peak_memory_bytes"] = max(answer["peak_memory_bytes"] or 0 for answer in calls[-1]) or None
    return found | {"anonymous_bytes": calls[-1][-1]["anonymous_bytes"]}


def spread(values: list[float], best=max) -> dict:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": statistics.median(values), "quartiles": [low, high], "fastest": best(values)}


def agreeing(row: list[int], right: list[int]) -> int:
    """The length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(row, right)) if a != b), min(len(row), len(right)))


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(result: dict) -> str:
    """The results as Markdown: a table for each model, batch and prompt, and the goals."""
    lines, groups = [], {}
    for row in result["results"]:
        groups.setdefault((row["model"], row["batch"], row["prompt"]), []).append(row)

    def cell(row, key, scale=1, digits=0):
        part = row.get(key)
        if part is None:
            return ""
        low, high = (f"{value * scale:,.{digits}f}" for value in part["quartiles"])
        return f"{part['median'] * scale:,.{digits}f} ({low} to {high})"

    for (model, batch, prompt), rows in groups.items():
        shown = prompt if isinstance(prompt, str) else f"prompt of {prompt} tokens"
        lines += ["", f"{model}, batch {batch}, {shown}", ""]
        if prompt == "fresh process":
            key = f"{FRESH_TOKENS}_tokens_s"
            lines += [f"| way | first token, s | {FRESH_TOKENS} tokens, s | peak, MB |", "|---|---|---|---|"]
            for row in rows:
                cells = [cell(row, "first_token_s", digits=1), cell(row, key, digits=1)]
                lines.append(harness.row([row["way"], *cells, f"{(row.get('peak_memory_bytes') or 0) / 1e6:,.0f}"]))
            continue
        heads = ("way", "first token, ms", "prefill, tokens/s", "decode, tokens/s", "over stock", "over llama.cpp")
        lines.append(harness.row([*heads, "peak, MB", "anonymous, MB"]))
        lines.append("|---" * 8 + "|")
        rate = "decode_tokens_per_s" if any("decode_tokens_per_s" in row for row in rows) else "prefill_tokens_per_s"
        speed = {row["way"]: row[rate]["median"] for row in rows if rate in row}
        for row in rows:
            if reason := row.get("left_out") or row.get("failed"):
                lines.append(f"| {row['way']} | {reason} | | | | | | |")
                continue
            own = speed.get(row["way"])
            ratios = [f"{own / speed[way]:.2f}" if own and way in speed else "" for way in (STOCK, "llama.cpp")]
            cells = [cell(row, "time_to_first_token_s", 1e3), cell(row, "prefill_tokens_per_s")]
            cells += [cell(row, "decode_tokens_per_s", digits=1), *ratios]
            cells += [f"{(row[key] or 0) / 1e6:,.0f}" for key in ("peak_memory_bytes", "anonymous_bytes")]
            lines.append(f"| {row['way']} | {' | '.join(cells)} |")
    lines += ["", "| goal | at least | measured |", "|---|---|---|"]
    lines += [f"| {goal['goal']} | {goal['at_least']} | {goal['measured']} |" for goal in result["goals"]]
    lines += ["", *(f"{line['model']}, {line['way']}: {line['reason']}" for line in result["absent"])]
    return "\n".join(lines).strip()


def main() -> None:
    parser = harness.parser(__doc__, "cpu_generate.json")
    parser.add_argument(
        "--quick", action="store_true", help="SmolLM2, batch 1, short prompts, 16 tokens, once: tests the script"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", choices=range(1, 9), metavar="1..8")
    parser.add_argument("--prompt", nargs="+", choices=PROMPTS)
    parser.add_argument("--ways", nargs="+", metavar="GLOB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=2.0, help="seconds of decoding a call")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="no case begins later than that")
    parser.add_argument("--resume", action="store_true", help="keep the output's rows; measure what is missing")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        return print(table(json.loads(options.output.read_text())))
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1")
    unknown = [glob for glob in options.ways or () if not fnmatch.filter(WAYS, glob)]
    if unknown:
        parser.error(f"--ways {' '.join(unknown)}: none of {', '.join(WAYS)}")
    quick = options.quick
    options.repeats = 1 if quick else options.repeats
    options.models = options.models or (["smollm2"] if quick else ["smollm2", "1b"])
    options.batch = options.batch or ([1] if quick else [1, 8])
    options.prompt = options.prompt or (["32", "512", "copying", "fresh"] if quick else PROMPTS)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    kept = earlier(options, parser) if options.resume else None
    torch.set_num_threads(options.threads)
    benchmark = Benchmark(options, kept)
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            benchmark.measure(model, folder_of(model, folder))


if __name__ == "__main__":
    main()
