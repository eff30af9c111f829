"""How fast `generate()` is: time to first token and decoded tokens per second."""

import statistics
import time
from collections.abc import Callable

import torch
from transformers.utils import logging


def generation_speed(
    generate: Callable[[int], object], batch_size: int, new_tokens: int, repeats: int = 3, progress: bool = True
) -> dict:
    """Times `generate(n)`, which must produce exactly n new tokens for each of `batch_size` sequences.

    A call with n = 1 gives the time to the first token. A call with n = `new_tokens`, less that time, gives the decoded
    tokens per second of all sequences. One call of each length comes first, uncounted: it compiles and captures.

    Returns:
        `time_to_first_token_s` and `tokens_per_second`, each {median, min, max, runs}, and `result` of the last long
        call.
    """
    for tokens in (1, new_tokens):
        generate(tokens)
    first, speed, result = [], [], None
    for _ in logging.tqdm(range(repeats), desc=f"generate, batch {batch_size}", disable=not progress, leave=False):
        first.append(_timed(generate, 1)[0])
        seconds, result = _timed(generate, new_tokens)
        speed.append(batch_size * (new_tokens - 1) / max(seconds - first[-1], 1e-9))
    return {"time_to_first_token_s": _spread(first), "tokens_per_second": _spread(speed), "result": result}


def _timed(generate: Callable[[int], object], tokens: int) -> tuple[float, object]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = generate(tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}
