"""The tables of methods: bits, perplexity, and what making the model takes."""

from result_files import load, markdown


BUSY = 3.0  # load average, of two cores and the run itself, beyond which other work made seconds longer
# name in quality.json -> what a reader calls it
METHODS = {
    "bf16": "bfloat16",
    "int8 channel gptq": "int8 per channel, GPTQ",
    "int8 channel rtn": "int8 per channel, to nearest",
    "w8a8 int8 smoothquant": "int8 weights and activations, SmoothQuant",
    "w8a8 int8 llm_int8": "LLM.int8()",
    "w8a8 fp8 dynamic": "FP8 weights and activations",
    "trellis 4.34 bits mixed gptq refine": "trellis of 4.34 bits on average, GPTQ and `refine=True`",
    "trellis 4 bits gptq refine": "trellis of 4 bits, GPTQ and `refine=True`",
    "trellis 4 bits gptq": "trellis of 4 bits, GPTQ",
    "int4 g32 gptq refine": 'int4 in groups of 32, GPTQ and `refine=True` (`quality="best"`)',
    "int4 g64 gptq refine": "int4, GPTQ and `refine=True`",
    "w4a4 g64 gptq refine": "int4 weights and inputs (W4A4), GPTQ and `refine=True`",
    "w4a6 g64 gptq": "int4 weights, inputs in 6 bits (W4A6), GPTQ",
    "w6a6 g64 gptq": "int6 weights, inputs in 6 bits (W6A6), GPTQ",
    "int4 g64 balanced, own text": 'int4, `quality="balanced"`, text of its own',
    "int4 g64 awq": "int4, AWQ",
    "int4 g64 gptq": "int4, GPTQ",
    "int4 g64 fast, no text": "int4, `WeightOnlyConfig()`",
    "int4 g64 hqq, float zero points": "int4, HQQ with float zero points",
    "nvfp4 gptq refine": "NVFP4, GPTQ and `refine=True`",
    "mxfp4 gptq refine": "MXFP4, GPTQ and `refine=True`",
    "nf4 g64": "NF4",
    "int4 g64 rtn": "int4, to nearest",
    "int3 g64 gptq refine": "int3, GPTQ and `refine=True`",
    "int3 g64 gptq": "int3, GPTQ",
    "int3 g64 fast, no text": "int3, `WeightOnlyConfig(bits=3)`",
    "trellis 3.33 bits mixed gptq refine": "trellis of 3.33 bits on average, GPTQ and `refine=True`",
    "trellis 2.33 bits mixed gptq refine": "trellis of 2.33 bits on average, GPTQ and `refine=True`",
    "trellis 2.03 bits mixed gptq refine": "trellis of 2.03 bits on average, GPTQ and `refine=True`",
    "trellis 1.64 bits mixed gptq refine": "trellis of 1.64 bits on average, GPTQ and `refine=True`",
    "int2 g64 gptq refine": "int2, GPTQ and `refine=True`",
    "trellis 2 bits gptq refine": "trellis of 2 bits, GPTQ and `refine=True`",
    "trellis 2 bits gptq": "trellis of 2 bits, GPTQ",
    "billm": "BiLLM",
    "pb_llm": "PB-LLM",
    "db_llm": "DB-LLM",
    "db_llm refine": "DB-LLM and `refine=True`",
    "slim_llm 3 bits g64": "SliM-LLM, 3 bits on average",
    "slim_llm 2 bits g64": "SliM-LLM, 2 bits on average",
}
METHODS = {
    name: text
    for row, method in METHODS.items()
    for name, text in ((row, method), (f"{row}, 10 minutes end to end", f"{method}, then 10 minutes as a whole"))
}


def quality_rows(names) -> list[list[str]]:
    """Rows of method, bits, perplexity, news, seconds, GB."""
    rows, results = [], load("quality")
    for name in names:
        row = results[name]
        busy = "*" if row.get("load_average", 0) > BUSY else ""
        seconds = "" if row["seconds"] is None or name == "bf16" else f"{row['seconds']:.0f}{busy}"
        perplexities = [f"{row[text]['perplexity']:.2f}" for text in ("wikipedia", "news")]
        peak = f"{row['peak_memory_bytes'] / 1e9:.2f}"
        rows.append([METHODS.get(name, name), f"{row['bits_per_weight']:.2f}", *perplexities, seconds, peak])
    return rows


def choose() -> str:
    """The methods that a newcomer chooses between."""
    header = "method | bits of a weight | perplexity | news | seconds | peak memory, GB"
    return markdown(header, "lrrrrr", quality_rows(name for name in METHODS if name in load("quality")))


def larger() -> str:
    """What quantizing a model with the shapes of a 1B model takes, by one of its 16 blocks."""
    rows = []
    for name, row in load("calibrate_1b").items():
        times = 16 / row["config"]["blocks"]
        minutes, peak = times * row["cpu_seconds"] / 60, row["peak_memory_bytes"] + (times - 1) * row["block_bytes"]
        rows.append([METHODS.get(name, name), str(row["config"]["windows"]), f"{minutes:.0f}", f"{peak / 1e9:.1f}"])
    return markdown("method | windows of text | CPU minutes, estimated | peak memory, GB, estimated", "lrrr", rows)


def all_methods() -> str:
    """Every row of quality.json, most bits first."""
    results = load("quality")
    names = sorted(
        results, key=lambda name: (-results[name]["bits_per_weight"], results[name]["wikipedia"]["perplexity"])
    )
    tasks = load("quality_tasks")
    rows = []
    for name, row in zip(names, quality_rows(names)):
        found = tasks[name]["tasks"]["next_passage"]["metrics"]["acc"] if name in tasks else None
        shown = "" if found is None else f"{100 * found['value']:.0f} (± {100 * found['standard_error']:.0f})"
        rows.append([*row, shown])
    header = "method | bits of a weight | perplexity | news | seconds | peak memory, GB | next passage, %"
    return markdown(header, "lrrrrrr", rows)


def peer_methods() -> str:
    """The peers on the same windows."""
    rows = []
    for name, row in load("quality_peers").items():
        perplexities = [f"{row[text]['perplexity']:.2f}" for text in ("wikipedia", "news")]
        types = sorted(row.get("types", {}).items(), key=lambda item: -item[1])
        came_out = ": " + ", ".join(f"{100 * share:.0f} % {kind}" for kind, share in types) if types else ""
        rows.append([name + came_out, row["package"], f"{row['bits_per_weight']:.2f}", *perplexities])
    return markdown("peer | package | bits of a weight | perplexity | news", "llrrr", rows)
