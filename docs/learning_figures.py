"""Tables of what training gives back, and of what each loss of distillation gives."""

from result_files import load, markdown


GPU_RATE = 0.4 * 989e12  # FLOP/s: what trainings commonly reach of an H100's bfloat16

RATE = "tokens_per_second"
LEARNING_GOALS = {  # perplexity on Wikipedia
    "int2 g64": 36,
    "int3 g64": 22,
    "int3 g64 fast": 22,
    "int4 g64": 19.9,
    "ternary": 90,
    "50 %": 23,
    "2:4": 30,
    "22 of 30 layers": 40,
    "half the layers": 40,
    "0.75 width": 33,
}


def learning() -> str:
    """The table of benchmarks/learning.py."""
    found = load("learning")
    rows = []
    named = ((name + end, goal) for name, goal in LEARNING_GOALS.items() for end in ("", ", cuda"))
    for name, goal in named:
        if name not in found:
            continue
        row = found[name]
        values = [row[text][key] for text in ("wikipedia", "news") for key in ("perplexity_before", "perplexity")]
        cells = ["" if value is None else f"{value:.2f}" for value in values]
        cells.insert(2, str(goal))
        share, minutes = row["arguments"]["text_share"], f"{row['cpu_seconds'] / 60:.0f}"
        gpu = f"{row['floating_point_operations'] / GPU_RATE:.1f}"
        device = row["environment"]["hardware"]["gpu"]
        if device is not None:
            name, minutes = name.removesuffix(", cuda"), f"{minutes}, {device}"
        rows.append([name, f"{share:g}", str(row["tokens"]), minutes, gpu, *cells])
    dense = next(iter(found.values()))
    whole = [f"{dense[text]['perplexity_dense']:.2f}" for text in ("wikipedia", "news")]
    rows.append(["bfloat16", "", "", "", "", whole[0], "", "", whole[1], ""])
    header = (
        "model | share of text | tokens | minutes | H100 seconds | before | after | goal | news before | news after"
    )
    return markdown(header, "lrrrrrrrrr", rows)


def training_steps() -> str:
    """The table of benchmarks/training_steps.py."""
    shown = {
        "eager": "one kernel after the other, torch's rounding",
        "kernel": "our kernel rounds",
        "graph": "CUDA graph",
        "both": "CUDA graph, our kernel rounds",
    }
    rows = [
        [shown[record["way"]], str(record["windows"]), f"{1e3 * record['seconds']:.0f}", str(round(record[RATE]))]
        for record in load("training_steps")["records"]
    ]
    return markdown("steps of int2 | windows of 512 tokens | ms | tokens/s", "lrrr", rows)


def losses() -> str:
    """What each loss of benchmarks/learning.py gives at equal minutes, over its seeds."""
    found, rows = load("learning"), []
    runs = {}
    for name, row in found.items():
        if name.startswith("loss: "):
            runs.setdefault(name.removeprefix("loss: ").split(", seed")[0], []).append(row)
    for name, seeds in runs.items():
        cells = []
        for text in ("wikipedia", "news"):
            values = [row[text]["perplexity"] for row in seeds]
            cells.append(f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        steps = [row["steps"] for row in seeds]
        minutes = sum(row["cpu_seconds"] for row in seeds) / len(seeds) / 60
        rows.append([name, f"{minutes:.1f}", f"{min(steps)} to {max(steps)}", *cells])
    return markdown("loss | CPU minutes | steps of 512 tokens | perplexity | news", "lrrrr", rows)
