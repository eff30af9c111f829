"""Latency and throughput of `generate()`: time to first token, between tokens, of a request; requests per second.

Requests of a batch start and end together, so the latency of a request is the time of its batch. Queries per second at
a latency bound are those of the fastest batch size whose 95th percentile of latency keeps the bound. Waiting in a queue
and requests of unequal length are not modelled.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import StoppingCriteria
from transformers.utils import logging

from hf_efficient.files import atomic_files


PERCENTILES = (50, 95, 99)


class TokenClock(StoppingCriteria):
    """A criterion for `generate(stopping_criteria=[...])` that records when each token was chosen and stops nothing.

    A streamer could record the same, but makes `generate()` take another decoding loop.
    """

    def __init__(self):
        self.start, self.times = time.perf_counter(), {}

    def __call__(self, input_ids, scores, **kwargs):
        self.times.setdefault(input_ids.shape[1], time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def seconds(self) -> list[float]:
        """Seconds from the start to each token, ascending."""
        return [moment - self.start for _, moment in sorted(self.times.items())]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """{"p50", "p95", "p99"} of `values`, interpolated linearly between neighbours, and their mean."""
    tensor = torch.tensor(values, dtype=torch.float64)
    found = {f"p{p}": torch.quantile(tensor, p / 100).item() for p in PERCENTILES}
    return found | {"mean": statistics.fmean(values)}


def measure_batch(generate: Callable[[TokenClock], object], batch_size: int, new_tokens: int, repeats: int) -> dict:
    """Times `repeats` runs of `generate(clock)` after one that is not counted.

    Each run must give each of `batch_size` sequences exactly `new_tokens` tokens.

    Returns:
        percentiles, in seconds, of `time_to_first_token`, `inter_token_latency` (between neighbouring tokens, of all
        runs) and `request_latency`; `tokens_per_second` (new tokens over the whole time, prefill included) and
        `requests_per_second`, both from the mean latency; `batch_size` and `runs`.

    Raises:
        RuntimeError: a run gave another number of tokens.
    """
    first, gaps, whole = [], [], []
    for run in logging.tqdm(range(repeats + 1), desc=f"batch {batch_size}", leave=False):
        clock = TokenClock()
        generate(clock)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total, times = time.perf_counter() - clock.start, clock.seconds()
        if len(times) != new_tokens:
            raise RuntimeError(f"{len(times)} tokens were generated and {new_tokens} asked for: nothing to compare")
        if run:
            first.append(times[0])
            gaps += [later - earlier for earlier, later in zip(times, times[1:])]
            whole.append(total)
    return {
        "batch_size": batch_size,
        "runs": repeats,
        "time_to_first_token": percentiles(first),
        "inter_token_latency": percentiles(gaps),
        "request_latency": percentiles(whole),
        "tokens_per_second": batch_size * new_tokens / statistics.fmean(whole),
        "requests_per_second": batch_size / statistics.fmean(whole),
    }


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`."""
    return [*(2**n for n in range((largest - 1).bit_length())), largest]


def at_latency_bound(batches: list[dict], bound: float) -> dict | None:
    """The batch with most requests per second whose 95th percentile of latency is within `bound` seconds, or None."""
    within = [batch for batch in batches if batch["request_latency"]["p95"] <= bound]
    return max(within, key=lambda batch: batch["requests_per_second"], default=None)


def write(content: dict, folder: Path, plotted: bool) -> list[Path]:
    """Writes bench.json and, when `plotted`, bench.png into `folder`, atomically."""
    with atomic_files(folder, "bench.json") as scratch:
        (scratch / "bench.json").write_text(json.dumps(content, indent=2) + "\n")
        if plotted:
            plot(content, scratch / "bench.png")
        names = sorted(path.name for path in scratch.iterdir())
    return [folder / name for name in names]


def plot(content: dict, path: Path) -> None:
    """Latencies and throughput over the batch size, and request latency over queries per second, as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches, figure = content["batches"], Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    sizes = [batch["batch_size"] for batch in batches]
    waits, speed, load = figure.subplots(1, 3)
    for p in PERCENTILES:
        gaps = [batch["inter_token_latency"][f"p{p}"] * 1e3 for batch in batches]
        waits.plot(sizes, gaps, marker="o", label=f"between tokens, p{p}")
    firsts = [batch["time_to_first_token"]["p50"] * 1e3 for batch in batches]
    waits.plot(sizes, firsts, marker="s", linestyle="--", label="first token, p50")
    waits.set(xlabel="batch", ylabel="ms", yscale="log")
    speed.plot(sizes, [batch["tokens_per_second"] for batch in batches], marker="o")
    speed.set(xlabel="batch", ylabel="new tokens/s")
    served = [batch["requests_per_second"] for batch in batches]
    load.plot(served, [batch["request_latency"]["p95"] for batch in batches], marker="o", label="request, p95")
    load.set(xlabel="queries/s", ylabel="s")
    if content["latency_bound"] is not None:
        load.axhline(content["latency_bound"], color="#999999", linestyle=":", label="bound")
    for axis in (waits, load):
        axis.legend(fontsize=8)
    for axis in (waits, speed):
        axis.set_xticks(sizes)
    speed.set_ylim(bottom=0)
    for axis in (waits, speed, load):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def table(content: dict) -> str:
    """The measured batches in Markdown."""
    head = ["batch", "first token ms, p50", "between tokens ms, p50", "p95", "p99", "new tokens/s", "request s, p95"]
    rows = [[*head, "queries/s"], ["---:"] * (len(head) + 1)]
    for batch in content["batches"]:
        gaps = batch["inter_token_latency"]
        rows.append(
            [
                str(batch["batch_size"]),
                f"{batch['time_to_first_token']['p50'] * 1e3:.1f}",
                *(f"{gaps[f'p{p}'] * 1e3:.2f}" for p in PERCENTILES),
                f"{batch['tokens_per_second']:.1f}",
                f"{batch['request_latency']['p95']:.3f}",
                f"{batch['requests_per_second']:.2f}",
            ]
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if content["latency_bound"] is not None:
        best = content["at_latency_bound"]
        best = f"{best['requests_per_second']:.2f} queries/s, batch {best['batch_size']}" if best else "none"
        lines += ["", f"within {content['latency_bound']:g} s (p95 of a request): {best}"]
    return "\n".join(lines)
