"""Tables of what `benchmarks/gpu.sh` measured on a GPU, from `benchmarks/results/gpu_*.json`."""

from result_files import load, markdown


PEERS = ("SDPA flash", "SDPA cuDNN", "SDPA efficient", "FlexAttention")
FIRST = ("transformers", "graphs")


def _measured(name: str, **case) -> list[dict]:
    """The right lines that agree with `case`."""
    lines = load(name)["results"]
    lines = [line for line in lines if line.get("correct", True) and "failed" not in line]
    return [line for line in lines if all(line.get(key) == value for key, value in case.items())]


def _us(lines: list[dict]) -> float | None:
    return lines[0]["us"]["median"] if lines else None


def gpu_machine(name: str) -> str:
    """Where a table comes from."""
    record = load(name)
    found, limits = record["environment"], record["limits"]
    versions = found["versions"]
    kept = sorted({tuple(line["measured"].values()) for line in record["results"] if "measured" in line})
    earlier = "".join(f"; other lines of {date}, commit {commit}" for date, commit in kept)
    return (
        f"From `benchmarks/results/{name}.json`: {found['hardware']['gpu']}, torch {versions['torch']}, triton "
        f"{versions['triton']}, transformers {versions['transformers']}, {found['date'][:10]}, commit "
        f"{found['commit']}{'' if record['complete'] else ', cut off by its time limit'}{earlier}. A copy moved "
        f"{limits['copy_gb_s']:,.0f} GB/s there, and a bfloat16 product of 8192 x 8192 x 8192 made "
        f"{limits['matmul_tflop_s']:.0f} TFLOP/s."
    )


def gpu_generate() -> str:
    """Tokens per second of an 8B shape, by loop."""
    ways = {"transformers": "transformers' loop", "graphs": "ours, CUDA graphs"}
    cases = {}
    for line in _measured("gpu_generate"):
        cases.setdefault((line["weights"], line["rows"]), {})[line["kernel"]] = line
    rows = []
    for (weights, count), lines in sorted(cases.items(), key=lambda case: (case[0][0], case[0][1])):
        speeds = [lines[way]["tokens_per_second"]["median"] if way in lines else None for way in ways]
        first = [lines[way]["time_to_first_token_s"]["median"] * 1e3 if way in lines else None for way in FIRST]
        rows.append([weights, str(count), *(f"{x:.0f}" if x else "" for x in (*speeds, *first))])
    title = f"weights | sequences | {' | '.join(ways.values())} | ms to the first token, transformers | ours"
    return markdown(title, "lr" + "r" * (len(ways) + len(FIRST)), rows)


def gpu_attention() -> str:
    """Microseconds of attention kernels, and times those of their peers."""
    rows = []
    for line in _measured("gpu_attention", ours=True):
        kernel = line["kernel"].removeprefix("flash_paged ")
        if kernel.startswith(("decode", "prefill")):
            shape = {key: line[key] for key in ("D", "S", "B", "causal", "context", "group") if key in line}
            kind = kernel.split(",")[0]
            others = [_us(_measured("gpu_attention", kernel=f"{peer} {kind}", **shape)) for peer in PEERS]
        else:
            others = [None] * len(PEERS)
        if kernel == "decode":
            what = f"{line['B']} x {line['context']:,} tokens, {line['format'] or 'bfloat16'}"
            what += f", pages of {line['block']}" if line["block"] else ", no pages"
            what += ", ragged" if line["lengths"] == "ragged" else ""
        elif "S" in line:
            what = f"{line['B']} x {line['S']:,} tokens{', causal' if line['causal'] else ''}"
            what += f", pages of {line['block']}" if "block" in line else ""
        else:
            what = f"{line['T']:,} tokens, {line['format'] or 'bfloat16'}"
        time = line["us"]["median"]
        bound = f"{line['tflop_s']:.0f} TFLOP/s" if "prefill" in kernel else f"{line['gb_s']:,.0f} GB/s"
        rows.append([kernel, what, f"{time:,.0f}", bound, *(f"{x / time:.2f}" if x else "" for x in others)])
    peers = " | ".join(f"times {peer}" for peer in PEERS)
    return markdown(f"kernel | work | us | rate | {peers}", "llrr" + "r" * len(PEERS), rows)


def gpu_linear() -> str:
    """How many times as fast as torch's bfloat16 product, by format and tokens."""
    tables, shapes = {}, sorted({(x["N"], x["K"]) for x in _measured("gpu_linear", kernel="bf16") if x["M"] == 1})
    tokens = sorted({x["M"] for x in _measured("gpu_linear", ours=True) if x["M"] <= 256})
    for line in _measured("gpu_linear"):
        dense = _us(_measured("gpu_linear", kernel="bf16", N=line["N"], K=line["K"], M=line["M"]))
        if dense and line["kernel"] != "bf16" and (line["N"], line["K"]) in shapes:
            ratios = tables.setdefault((line["ours"], line["kernel"]), {})
            ratios[line["N"], line["K"], line["M"]] = dense / _us([line])
    columns = [(n, k, m) for n, k in shapes for m in tokens]
    rows = [
        [kernel, "" if ours else "peer", *(f"{found[at]:.2f}" if at in found else "" for at in columns)]
        for (ours, kernel), found in sorted(tables.items(), key=lambda table: not table[0][0])
    ]
    title = " | ".join(f"{n} x {k}, {m}" for n, k, m in columns)
    return markdown(f"weights | | {title}", "ll" + "r" * len(columns), rows)
