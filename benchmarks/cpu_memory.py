"""How much memory a process takes that loads a model and generates on a CPU, and how soon its first token comes: ours
from a saved checkpoint beside stock transformers and llama.cpp. Writes benchmarks/results/cpu_memory.json.

    python benchmarks/cpu_memory.py [--models smollm2 1b] [--ways GLOB ...] [--calls 3] [--threads 2]
        [--checkpoints FOLDER] [--output FILE]
    python benchmarks/cpu_memory.py --starts 5 [--models smollm2] ...      # on a machine that does nothing else

SmolLM2-135M-Instruct and a random Llama of a 1B model's shape, greedy. A process of each way loads its model, reads a
prompt of 32 tokens and writes 32 (`peak_bytes`), then `--calls` times 8 prompts of 1,024 tokens, and writes 8
(`wide_peak_bytes`). Ours reads prompts eagerly at first, then captures and replays; the peak covers all of it. Peaks
are of the resident memory since the process began, so loading is included. Checkpoints are mapped, by stock
transformers and by ours. `imports_bytes` is the peak of a process that only imports what all of ours import.

`--starts`: so many processes of each way, in turns, are started and timed to the first token after a prompt of 32:
`first_token_s`, medians. Of them `imports_s` is what a process takes that only imports.

Rows of the output stay until they are measured anew. llama.cpp takes part where llama_cpp is on PYTHONPATH, see
cpu_generate.py. It reads one sequence only. Memory does not depend on other load of the machine; times do.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import harness
from cpu_generate_goals import LIKE, SAVED, SMALLEST
from cpu_generate_models import MODELS, Texts, folder_of
from cpu_generate_peers import checkpoint
from cpu_generate_ways import STOCK, Worker
from harness import rounded

from hf_efficient.evaluation import environment, samples


ALL_IN_4_BITS = "ours int4, 4-bit embeddings"
WIDE = 8, 1024
SHORT = 1, 32
WAYS = {STOCK: STOCK, "llama.cpp": "llama.cpp", **{f"{way}, saved": way for way in (LIKE, SMALLEST, ALL_IN_4_BITS)}}
IMPORTS = """
import time
import hf_efficient, torch, transformers.models.llama.modeling_llama
from hf_efficient.evaluation import memory
print(memory.peak_memory_bytes(torch.device("cpu")), time.perf_counter())
"""


def imports() -> tuple[int, float]:
    """Peak in bytes of a process that only imports, and seconds until it has; not what it takes to end."""
    start = time.perf_counter()
    found = subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True).stdout.split()
    return int(found[0]), float(found[1]) - start


def starts(ways: dict[str, tuple[str, str]], texts, threads: int, count: int) -> dict[str, dict]:
    """Name -> its row of times. ways: name -> (way of `Worker`, folder)."""
    ids = texts.rows(*SHORT)
    seconds = {name: [] for name in (*ways, "imports")}
    for _ in range(count):
        seconds["imports"].append(imports()[1])
        for name, (way, folder) in ways.items():
            worker = Worker(way, folder, threads)
            worker.send(ids=ids, new=1, stop=1, end=None, patience=60.0, lookup=False, warm=False)
            answers = worker.read(), worker.read()
            worker.close()
            seconds[name].append(answers[1]["first_at"] - worker.started)
    rows = {name: {"first_token_s": statistics.median(values), "starts": values} for name, values in seconds.items()}
    only = rows.pop("imports")["first_token_s"]
    return {name: {**row, "imports_s": only, "load_average": os.getloadavg()[0]} for name, row in rows.items()}


def measure(way: str, folder: str, texts, threads: int, calls: int) -> dict:
    """The row of a process of `way`, which loads `folder`."""
    worker = Worker(way, folder, threads)
    row, answer = {}, worker.read()
    row["loading_peak_bytes"] = answer.get("loading_peak_bytes")
    for key, (batch, prompt), new, times in (("peak_bytes", SHORT, 32, 1), ("wide_peak_bytes", WIDE, 8, calls)):
        if not times or (way == "llama.cpp" and batch > 1):
            continue
        ask = dict(ids=texts.rows(batch, prompt), new=new, stop=new, end=None, patience=600.0, lookup=False, warm=False)
        for _ in range(times):
            answer = answer if "failed" in answer else worker.ask(**ask)
        row[key] = answer.get("peak_memory_bytes")
    worker.close()
    return {"failed": answer["failed"]} if "failed" in answer else row


def prepared(name: str, folder: Path, model: str) -> tuple[str, str]:
    """The way of `Worker`, and the folder that it loads: a checkpoint is made where it is missing."""
    if name.endswith(", saved"):
        return SAVED, checkpoint(WAYS[name], folder, model)
    return WAYS[name], model


def goals(rows: list[dict]) -> list[dict]:
    found, reached = {(row["model"], row["way"]): row for row in rows}, []

    def ratio(model, way, key, other, bound=1.0):
        mine, theirs = found.get((model, way), {}).get(key), other(model)
        return bound * theirs / mine if mine and theirs else None

    def of(way, key):
        return lambda model: found.get((model, way), {}).get(key)

    def needed(model):
        row = found.get((model, f"{LIKE}, saved"), {})
        return row["imports_bytes"] + row["checkpoint_bytes"] if "imports_bytes" in row else None

    for way in (f"{LIKE}, saved", f"{SMALLEST}, saved", f"{ALL_IN_4_BITS}, saved"):
        for other, most in ((STOCK, 0.75), ("llama.cpp", 1.4)):
            value = ratio("smollm2", way, "peak_bytes", of(other, "peak_bytes"), most)
            reached.append((f"smollm2: {most} × the peak of {other} over that of {way}", 1.0, value))
    value = ratio("1b", f"{LIKE}, saved", "peak_bytes", needed, 1.15)
    reached.append((f"1b: 1.15 × (checkpoint and imports) over the peak of {LIKE}, saved", 1.0, value))
    for model in ("smollm2", "1b"):
        value = ratio(model, f"{LIKE}, saved", "wide_peak_bytes", of(STOCK, "wide_peak_bytes"))
        reached.append((f"{model}: peak of {STOCK} over that of {LIKE}, saved, 8 x 1024", 1.0, value))
    value = found.get(("smollm2", f"{LIKE}, saved"), {}).get("first_token_s")
    reached.append((f"3.2 s over the first token of a new process of {LIKE}, saved", 1.0, value and 3.2 / value))
    return rounded(harness.goals(reached, True))


def main() -> None:
    parser = harness.parser(__doc__, "cpu_memory.json")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "1b"])
    parser.add_argument("--ways", nargs="+", default=["*"], metavar="GLOB")
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, default=samples.cache_directory() / "cpu-memory")
    options = parser.parse_args()
    rows = harness.read(options.output, {}).get("results", [])
    for model in options.models:
        own = options.checkpoints / model
        own.mkdir(parents=True, exist_ok=True)
        folder = str(own / "source") if MODELS[model] else str(samples.sample_model())
        if MODELS[model] and not (own / "source").exists():
            folder_of(model, folder)
        texts = Texts(model, folder)
        names = harness.matching(WAYS, options.ways)
        places = {name: prepared(name, own, folder) for name in names}
        timed = starts(places, texts, options.threads, options.starts) if options.starts else {}
        for name, (way, saved) in places.items():
            old = next((row for row in rows if (row["model"], row["way"]) == (model, name)), {})
            row = {"model": model, "way": name}
            if options.starts:
                row = {**old, **row, **timed[name]}
            else:
                kept = {key: old[key] for key in ("first_token_s", "starts", "imports_s", "load_average") if key in old}
                row |= {**kept, "calls": options.calls, **measure(way, saved, texts, options.threads, options.calls)}
                if name.endswith(", saved"):
                    row["checkpoint_bytes"] = sum(file.stat().st_size for file in Path(saved).glob("*.safetensors"))
                    row["imports_bytes"] = imports()[0]
            row |= {"environment": environment.describe(), "threads": options.threads}
            row = rounded(row)
            print(row, flush=True)
            rows = [other for other in rows if (other["model"], other["way"]) != (model, name)] + [row]
            result = {
                "question": "resident memory of a process that loads a model and generates on a CPU",
                "environment": environment.describe(),
                "goals": goals(rows),
                "results": rows,
            }
            harness.write(options.output, result)
    harness.print_goals(goals(rows))


if __name__ == "__main__":
    main()
