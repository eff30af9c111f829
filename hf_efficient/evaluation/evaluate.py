"""The accuracy of a loaded model: perplexity, and tasks of lm-evaluation-harness."""

import importlib.metadata

import torch

from hf_efficient.evaluation import environment, memory, perplexity
from hf_efficient.evaluation.tasks import run_tasks


def windows_of(tokenizer, text: str, count: int, length: int) -> torch.Tensor:
    """`perplexity.windows`, whose error names the arguments: int64 [count, length]."""
    try:
        return perplexity.windows(tokenizer, text, count, length)
    except ValueError as error:
        raise ValueError(f"windows={count}: {error}") from None


def evaluate(model, tokenizer, windows: torch.Tensor | None, text: str, tasks: dict | None) -> dict:
    """Measures a causal language model of transformers.

    Args:
        windows: int64 [windows, length], for the perplexity; None: it is not measured.
        text: what the windows are called.
        tasks: arguments of `run_tasks`; None: none is run.

    Returns:
        `dtype`, `weight_bytes`, `perplexity`, `tasks`, `limit`, `lm_eval` and `environment`, ready for JSON. Negative
        log-likelihoods are in nats per token.
    """
    found = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "weight_bytes": 0,
        "perplexity": None if windows is None else _perplexity(model, windows, text),
        "tasks": {} if tasks is None else run_tasks(model, tokenizer, **tasks),
        "limit": None if tasks is None else tasks["limit"],
        "lm_eval": None if tasks is None else importlib.metadata.version("lm_eval"),
        "environment": environment.describe(),
    }
    found["weight_bytes"] = memory.weight_bytes(model)  # after forwards: device layouts have been derived
    return found


def _perplexity(model, windows: torch.Tensor, text: str) -> dict:
    nll = perplexity.negative_log_likelihood(model, windows)
    return {
        "perplexity": perplexity.perplexity(nll),
        "nll": nll.mean().item(),
        "standard_error": (nll.std() / len(nll) ** 0.5).item() if len(nll) > 1 else None,
        "text": text,
        "windows": windows.shape[0],
        "window_length": windows.shape[1],
        "nll_per_window": nll.tolist(),
    }
