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
    "both": "`BestOf(PromptLookup(32), TokenRecycling())`",
    "assistant": "the model itself in 4 bits",
    "heads": "`DraftHeads`",
    "heads int8": "`DraftHeads`, `bits = 8`",
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
                rows.append([prompts, WAYS[record["way"]], *(f"{value:.2f}" for value in values)])
    header = "Prompts | Drafter | whole call | without the prompt | tokens per step | v | c | modelled H200"
    return markdown(header, "llrrrrrr", rows) + "\n\n" + machine("speculation_cpu")


def assisted() -> str:
    """Whisper's decoder."""
    rows = []
    for record in load("encoder_decoders_cpu")["records"]:
        median = {name: values["median"] for name, values in record["decoding_ms"].items()}
        name = f"whisper-{record['shape']}, {record['dtype']}"
        values = median["transformers"], median["native"], median[record["best"]]
        ratios = record["native_over_transformers"], record["assisted_over_native"]
        rows.append([name, *(f"{value:.1f}" for value in values), *(f"{ratio:.2f}" for ratio in ratios)])
    header = "Decoder | transformers, ms a token | plain, ms | assisted, ms | plain, times faster | assisted by plain"
    return markdown(header, "lrrrrr", rows)
