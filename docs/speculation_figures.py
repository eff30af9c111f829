"""Tables of what speculation gains."""

from result_files import load, machine, markdown


PROMPTS = {
    ("copying", 1): "copying, one prompt",
    ("copying", 8): "copying, eight prompts at once",
    ("long", 1): "copying, prompts of 1,800 to 2,010 tokens",
    ("chat", 1): "chat, one prompt",
    ("chat", 8): "chat, eight prompts at once",
}
WAYS = {
    "prompt_lookup": "`PromptLookup(32)`",
    "token_recycling": "`TokenRecycling()`",
    "both": "`BestOf(PromptLookup(32), TokenRecycling())`",
    "assistant": "the model itself in 4 bits",
    "heads": "`DraftHeads`",
    "heads int4": "`DraftHeads`, `bits = 4`",
}


def speculation() -> str:
    """SmolLM2: seconds of plain decoding by those with a drafter, and what they come from."""
    rows = []
    records = load("speculation_cpu")["records"]
    for key, prompts in PROMPTS.items():
        for record in records:
            if (record["prompts"], record["batch"]) == key and record["way"] in WAYS:
                values = record["ratio"]["generate"], record["decoding_ratio"], record["tokens_per_step"]
                values = *values, record["v"], record["c"], record["h200"]["speedup"]
                rows.append([prompts, WAYS[record["way"]], record["identical"], *(f"{value:.2f}" for value in values)])
    header = "Prompts | Drafter | identical | whole call | without the prompt | tokens per step | v | c | modelled H200"
    return markdown(header, "llrrrrrrr", rows) + "\n\n" + machine("speculation_cpu")


def assisted() -> str:
    """Whisper's decoder."""
    rows = []
    for record in load("encoder_decoders_cpu")["records"]:
        median = {name: values["median"] for name, values in record["decoding_ms"].items()}
        name = f"whisper-{record['shape']}, {record['dtype']}"
        values = median["transformers"], median["native"], median[record["best"]]
        seconds = {way: values["median"] for way, values in record["call_seconds"].items()}
        whole = seconds["native"] / seconds[record["best"]]
        ratios = record["native_over_transformers"], record["assisted_over_native"], whole
        numbers = *(f"{value:.1f}" for value in values), *(f"{ratio:.2f}" for ratio in ratios)
        rows.append([name, str(record["repeats"]), *numbers])
    header = "Decoder | runs | transformers, ms a token | plain, ms | assisted, ms | plain, times faster"
    return markdown(f"{header} | assisted by plain | whole call", "lrrrrrrr", rows)


def goals() -> str:
    """What speculation was to reach, and what was measured."""
    found = {(line["prompts"], line["batch"], line["way"]): line for line in load("speculation_cpu")["records"]}
    whisper = {f"{line['shape']}, {line['dtype']}": line for line in load("encoder_decoders_cpu")["records"]}

    def best(kind: str, size: int, field, ways: tuple[str, ...], choose=max) -> float | None:
        return choose((field(found[kind, size, way]) for way in ways if (kind, size, way) in found), default=None)

    whole, decoding = lambda line: line["ratio"]["generate"], lambda line: line["decoding_ratio"]
    pairs, lookup = lambda line: line["calls"]["median"], ("prompt_lookup",)
    heads, medium = ("heads", "heads int4"), whisper["medium, bfloat16"]
    sources = "whisper-medium, eight sources, without the prompt"
    rows = [
        ("copying, eight prompts at once, whole call", 2.0, best("copying", 8, whole, lookup)),
        ("long prompts, prompt lookup, without the prompt", 2.5, best("long", 1, decoding, lookup)),
        ("long prompts, prompt lookup, whole call", 2.5, best("long", 1, whole, lookup)),
        ("chat, one prompt, the better of both heads", 1.4, best("chat", 1, whole, heads)),
        ("chat, eight prompts, the slowest drafter, median of 20 pairs", 1.0, best("chat", 8, pairs, tuple(WAYS), min)),
        (f"{sources}, assisted by plain", 1.5, medium["assisted_over_native"]),
        (f"{sources}, plain by transformers", 2.0, medium["native_over_transformers"]),
    ]
    lines = [[goal, f"{least:.1f}", f"{value:.2f}"] for goal, least, value in rows if value is not None]
    return markdown("Goal | at least | measured", "lrr", lines)
