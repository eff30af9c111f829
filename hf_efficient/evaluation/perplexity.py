"""Perplexity over windows of a text that do not overlap, and the difference between two models paired by window."""

import torch
from transformers.utils import logging

from hf_efficient.kernels.widened_products import widened_products


def windows(tokenizer, text: str, count: int, length: int) -> torch.Tensor:
    """The first `count` windows of `length` tokens, without special tokens: int64 [count, length].

    Raises:
        ValueError: where the text has fewer tokens than that.
    """
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    if len(ids) < count * length:
        raise ValueError(f"the text has {len(ids)} tokens; {count} windows of {length} tokens need {count * length}")
    return ids[: count * length].view(count, length)


@torch.no_grad()
def negative_log_likelihood(model, tokens: torch.Tensor, progress: bool = True) -> torch.Tensor:
    """Mean negative log-likelihood (nats per predicted token) of every window.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        tokens: int64 [windows, length]; the first token of a window is not predicted.
        progress: whether to show a progress bar.

    Returns:
        float64 [windows], on the CPU. The log-softmax is taken in float32.
    """
    result = []
    for window in logging.tqdm(tokens, desc="perplexity", disable=not progress, leave=False):
        window = window.to(model.device)
        with widened_products(model.device):
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
        result.append(torch.nn.functional.cross_entropy(logits, window[1:]).double().cpu())
    return torch.stack(result)


def perplexity(nll: torch.Tensor) -> float:
    """exp of the mean of the windows' negative log-likelihoods (float64 [windows]), infinite beyond the range."""
    return nll.mean().exp().item()


def paired_difference(nll: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Mean difference of two models' negative log-likelihoods (float64 [windows]) and its standard error, nats."""
    difference = nll - reference
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item()


@torch.no_grad()
def kl_divergence(reference, model, window: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of `model`'s next-token distributions from those of `reference`, in nats per
    predicted token, over one window of tokens, int64 [length]."""
    logs = []
    for each in (reference, model):
        with widened_products(each.device):
            logits = each(input_ids=window.to(each.device)[None], use_cache=False).logits[0, :-1]
        logs.append(logits.float().log_softmax(-1).cpu())
    return (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
