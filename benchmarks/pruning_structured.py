"""What does structured pruning of 20 % of the parameters cost in perplexity; how much faster does it decode on a CPU?

    python benchmarks/pruning_structured.py [--rows GLOB ...] [--tokens FILE] [--calibration-tokens FILE] [--missing]
    python benchmarks/pruning_structured.py --speed      # tokens/s of what is there, all in one run
    python benchmarks/pruning_structured.py --table      # pruning_structured.md

SmolLM2-135M-Instruct in bfloat16: 134.5 million parameters, 106.2 of them outside the embedding, which is also the
output head. Nothing is trained after pruning. "Removed" counts the parameters that a token reads: all of them while the
head is tied; SliceGPT unties it, so its checkpoint also holds an embedding. Perplexity on 24 windows of 1,024 tokens of
Wikipedia, differences to the dense model paired by window; calibration on 16 windows of 512 tokens of other articles.
Each row runs in its own process and leaves its model in --models. Speed: greedy decode of 64 tokens after a prompt of
32, batch 1, the models taking turns; "ours" is this package's plain generation, "stock" that of transformers. FILE as
in quality.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import harness
import torch


MODELS = Path("/tmp/hf_efficient-pruning-structured")
WINDOWS, LENGTH, CALIBRATION, PROMPT, NEW = 24, 1024, (16, 512), 32, 64

ROWS = {
    "dense": None,
    "shape, width": dict(method="shape", shape={"intermediate_size": 1016}),
    "llm_pruner": dict(method="llm_pruner", remove=0.2),
    "slicegpt": dict(method="slicegpt", remove=0.2),
    "l1": dict(method="l1", remove=0.2),
    "shape, depth": dict(method="shape", shape={"num_hidden_layers": 22}),
    "shape, both": dict(method="shape", shape={"num_hidden_layers": 27, "intermediate_size": 1184}),
    "llm_pruner, only cut": dict(method="llm_pruner", remove=0.2, repair=False),
    "slicegpt, only cut": dict(method="slicegpt", remove=0.2, repair=False),
    "l1, only cut": dict(method="l1", remove=0.2, repair=False),
}


def measure(name: str, options) -> dict:
    """One row."""
    import transformers

    import hf_efficient
    from hf_efficient.evaluation import environment, memory, perplexity
    from hf_efficient.pruning.structured.shapes import read_parameters

    transformers.logging.set_verbosity_error()
    model = harness.load()
    arguments, seconds = ROWS[name], 0.0
    if arguments is not None:
        calibration = harness.windows(options.calibration_tokens, "calibration", *CALIBRATION)
        start = time.perf_counter()
        calibration = hf_efficient.CalibrationConfig(tokens=calibration)
        model = hf_efficient.prune_structure(model, calibration=calibration, **arguments)
        seconds = time.perf_counter() - start
        model.save_pretrained(options.models / name)
    windows = harness.windows(options.tokens, "evaluation", WINDOWS, LENGTH)
    nll = perplexity.negative_log_likelihood(model, windows, progress=False)
    fields = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    outside = sum(p.numel() for p in model.parameters() if p is not embedding and p is not head)
    return {
        "arguments": arguments,
        "shape": {field: getattr(model.config, field) for field in fields},
        "parameters": model.num_parameters(),
        "parameters_read": read_parameters(model),
        "parameters_outside_embedding_and_head": outside,
        "perplexity": perplexity.perplexity(nll),
        "nll": nll.tolist(),
        "seconds": seconds,
        "load_average": os.getloadavg()[1],
        "peak_memory_bytes": memory.peak_memory_bytes(torch.device("cpu")),
        "environment": environment.describe(),
    }


def speed(options) -> dict:
    """Tokens/s of every model of the results, in turns; the first call of each is not counted."""
    import transformers

    import hf_efficient
    from hf_efficient.evaluation import environment
    from hf_efficient.evaluation.bench import TokenClock

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    names = [name for name in json.loads(options.output.read_text())["rows"] if "only cut" not in name]
    prompt = harness.windows(options.tokens, "evaluation", 1, PROMPT)[:, :PROMPT]
    runs = {name: {"ours": [], "stock": []} for name in names}
    models = {}
    for name in names:
        for way in ("ours", "stock"):
            models[name, way] = harness.load(None if name == "dense" else options.models / name)
        hf_efficient.enable_speculation(models[name, "ours"])
    length = dict(do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
    for turn in range(options.repeats + 1):
        for (name, way), model in models.items():
            clock = TokenClock()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), stopping_criteria=[clock], **length)
            if turn:
                times = clock.seconds()
                runs[name][way].append((len(times) - 1) / (times[-1] - times[0]))
    result = {
        name: {way: {"median": statistics.median(v), "all": v} for way, v in ways.items()}
        for name, ways in runs.items()
    }
    for ways in result.values():
        for way, found in ways.items():
            found["over_dense"] = found["median"] / result["dense"][way]["median"]
    return {"decode_tokens_per_s": result, "threads": options.threads, "environment": environment.describe()}


def table(done: dict) -> str:
    from hf_efficient.evaluation.perplexity import paired_difference

    rows, speeds = done["rows"], done.get("speed", {}).get("decode_tokens_per_s", {})
    dense = rows["dense"]
    lines = [
        "| method | layers, hidden, neurons, heads (key-value) | removed of what a token reads | of all outside "
        "embedding and head | of the checkpoint | perplexity | Δ nat (se) | s | decode, tokens/s, ours | stock |",
        "|---|---|" + "---:|" * 8,
    ]
    for name, row in rows.items():
        shape = row["shape"]
        difference = paired_difference(torch.tensor(row["nll"]).double(), torch.tensor(dense["nll"]).double())
        counts = ("parameters_read", "parameters_outside_embedding_and_head", "parameters")
        sizes = "{num_hidden_layers}, {hidden_size}, {intermediate_size}, {num_attention_heads} ({num_key_value_heads})"
        cells = [name, sizes.format(**shape)]
        cells += [f"{1 - row[count] / dense[count]:.1%}" for count in counts]
        cells += [f"{row['perplexity']:.2f}", f"{difference[0]:+.3f} ({difference[1]:.3f})", f"{row['seconds']:.0f}"]
        for way in ("ours", "stock"):
            found = speeds.get(name, {}).get(way)
            cells.append(f"{found['median']:.1f} ({found['over_dense']:.2f}×)" if found else "")
        lines.append(harness.row(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = harness.parser(__doc__, "pruning_structured.json")
    parser.add_argument("--rows", nargs="*", default=["*"], help="globs of row names")
    parser.add_argument("--tokens")
    parser.add_argument("--calibration-tokens")
    parser.add_argument("--missing", action="store_true", help="only rows that the output does not hold")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    done = harness.read(options.output, {"rows": {}})
    if options.speed:
        done["speed"] = speed(options)
    elif not options.table:
        options.models.mkdir(parents=True, exist_ok=True)
        chosen = harness.matching(ROWS, options.rows)
        chosen = ["dense", *chosen] if "dense" not in chosen and "dense" not in done["rows"] else chosen
        for name in chosen:
            if options.missing and name in done["rows"]:
                continue
            command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if result.returncode:
                sys.exit(f"{name} failed")
            done["rows"][name] = json.loads(result.stdout.splitlines()[-1])
            done["rows"] = {name: done["rows"][name] for name in ROWS if name in done["rows"]}
            harness.write(options.output, done)
            print(f"{name}: {done['rows'][name]['perplexity']:.2f}", flush=True)
    harness.write(options.output, done)
    options.output.with_suffix(".md").write_text(table(done))


if __name__ == "__main__":
    main()
