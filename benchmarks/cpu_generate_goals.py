"""What benchmarks/cpu_generate.py is to show of SmolLM2, as ratios of medians of the same run."""

import harness
from cpu_generate_ways import STOCK, WAYS
from harness import rounded


LOOKUP = ", prompt lookup"  # of the same process, asked for it
LIKE, LEAST = "ours int4, int8 head", "ours int4, int4 head"  # as llama.cpp has it; all in 4 bits
SAME = "ours, the GGUF"  # which llama.cpp runs
SMALLEST, SAVED = "ours int4, embeddings", "ours bf16"  # the latter loads whatever a folder says it is
FORMATS = {  # way -> what its decode speed is compared with, and the least ratio
    "ours W8A8": ("ours int8", 0.95),
    "ours LLM.int8()": ("ours int8", 0.95),
    "ours FP8": ("ours int8", 0.9),
    "ours NF4": ("ours int4", 0.95),
    "ours k-means": ("ours int4", 0.95),
    "ours BitNet": ("ours int2", 0.95),
}
MEMORY = (STOCK, "llama.cpp", f"{LIKE}, saved", f"{SMALLEST}, saved")


def goals(rows: list[dict], quick: bool) -> list[dict]:
    """What SmolLM2 is to reach, as ratios of medians of the same run."""
    found = {(row["way"], row["batch"], row["prompt"]): row for row in rows if row["model"] == "smollm2"}
    decode, prefill = "decode_tokens_per_s", "prefill_tokens_per_s"

    def median(key, way, batch, prompt):
        return found.get((way, batch, prompt), {}).get(key, {}).get("median")

    lines = []
    for prompt in (32, 1024):
        lines += [
            *((f"{way} over llama.cpp", 1.0, decode, way, "llama.cpp", 1, prompt) for way in (LEAST, LIKE)),
            (f"{LIKE} over stock", 4.0, decode, LIKE, STOCK, 1, prompt),
            ("ours int8 over stock", 2.5, decode, "ours int8", STOCK, 1, prompt),
            (f"{LIKE} over stock", 2.5, decode, LIKE, STOCK, 8, prompt),
        ]
    lines += [(f"{way} over {like}", least, decode, way, like, 1, 32) for way, (like, least) in FORMATS.items()]
    lines += [(f"{way} over stock", 3.0, decode, way, STOCK, 1, 32) for way in FORMATS]
    lines += [(f"{way} over stock", 0.97, prefill, way, STOCK, 1, 512) for way in WAYS if way.startswith("ours")]
    lines.append(("the fastest of ours over stock", 1.3, prefill, None, STOCK, 1, 512))
    reached = []
    for text, least, key, way, other, batch, prompt in lines:
        ways = [way] if way else [way for way in WAYS if way.startswith("ours")]
        ours = [value for value in (median(key, way, batch, prompt) for way in ways) if value]
        theirs = median(key, other, batch, prompt)
        goal = f"{key.split('_')[0]} of {text}, batch {batch}, prompt {prompt}"
        reached.append((goal, least, max(ours) / theirs if ours and theirs else None))
    ours, theirs = median(decode, SAME + LOOKUP, 1, "copying"), median(decode, "llama.cpp", 1, "copying")
    reached.append(
        ("decode with prompt lookup over plain llama.cpp, copying", 2.5, ours / theirs if ours and theirs else None)
    )
    first = median("first_token_s", f"{LIKE}, saved", 1, "fresh process")
    reached.append((f"3.2 s over the first token of a fresh process of {LIKE}, saved", 1.0, first and 3.2 / first))
    peaks = {way: found.get((way, 1, "fresh process"), {}).get("peak_memory_bytes") for way in MEMORY}
    for other, least in ((STOCK, 1 / 0.75), ("llama.cpp", 1 / 1.4)):
        for way in MEMORY[2:]:
            ratio = peaks[other] / peaks[way] if peaks[other] and peaks[way] else None
            reached.append((f"peak memory of {other} over that of {way}", least, ratio))
    return rounded(harness.goals(reached, not quick))
