"""A small model that drafts for a target: distilled on what the target writes and on what it drafts itself."""

import time
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.compression.distillation import distill
from hf_efficient.compression.distillation.written import answers
from hf_efficient.compression.structured_pruning import prune_structure
from hf_efficient.configs.checks import check, is_integer
from hf_efficient.generation.training.prompts import default_prompts


BATCH_ROWS = 8  # answers a step
HELD_OUT = 20  # one prompt in so many is held out: acceptance is measured on the answers to them
ON_POLICY = 0.5  # share of the steps in which the draft writes
LENGTH = 512  # tokens of a prompt with its answer, at most
logger = logging.get_logger(__name__)


def train_draft_model(
    model,
    tokenizer,
    output: Path,
    *,
    draft=None,
    layers: int | None = None,
    prompts: list[str] | None = None,
    num_tokens: int = 300_000,
    epochs: int = 5,
    minutes: float | None = None,
    max_new_tokens: int = 256,
    learning_rate: float = 5e-4,
    seed: int = 0,
    cache=None,
) -> nn.Module:
    """`train_draft` with kind="model", which documents the arguments."""
    if (draft is None) == (layers is None):
        raise ValueError(f"draft={draft!r:.40}, layers={layers}: kind='model' needs one of them")
    most = model.config.get_text_config().num_hidden_layers - 1
    is_fewer = layers is None or (is_integer(layers, 1) and layers <= most)
    check(is_fewer, "layers", layers, f"an integer from 1 to {most}")
    if draft is model:
        raise ValueError("draft is the target itself: give a smaller model")
    start, folder = time.perf_counter(), output.with_name(output.name + "-progress") if cache is None else Path(cache)
    given = default_prompts(seed) if prompts is None else prompts
    given = [given[i % len(given)] for i in range(-(-num_tokens // max_new_tokens))]
    held_out, learned = given[::HELD_OUT], [p for i, p in enumerate(given) if i % HELD_OUT] or given
    if draft is None:
        draft = prune_structure(model, "shape", shape={"num_hidden_layers": layers}, tokenizer=tokenizer)
    budget = {"steps": max(1, epochs * len(learned) // BATCH_ROWS)}
    if minutes is not None:
        budget = {"minutes": max(0.01, minutes - (time.perf_counter() - start) / 60)}
    draft, result = distill(
        draft,
        model,
        tokenizer=tokenizer,
        prompts=learned,
        max_new_tokens=max_new_tokens,
        on_policy=ON_POLICY,
        divergence="jensen_shannon",
        batch_size=min(BATCH_ROWS, len(learned)),
        learning_rate=learning_rate,
        sequence_length=LENGTH,
        checkpoint_dir=folder,
        seed=seed,
        **budget,
    )
    draft.expected_acceptance = expected_acceptance(draft, model, tokenizer, held_out, max_new_tokens, seed)
    logger.info(f"draft model: {result['steps']} steps, expected acceptance {draft.expected_acceptance:.3f}")
    draft.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return draft


@torch.no_grad()
def expected_acceptance(draft, target, tokenizer, prompts: list[str], new: int, seed: int = 0) -> float:
    """How probable it is that a drafted token is accepted when both sample at temperature 1: the mean over the tokens
    of the target's answers of the sum of min(p, q) (https://arxiv.org/abs/2211.17192)."""
    total, count = 0.0, 0
    for row in answers(target, tokenizer, prompts, LENGTH, new, seed + 1):
        answer, tokens = row["answer"][1:] == 1, row["input_ids"][None].to(target.device)
        p, q = (model(tokens, use_cache=False).logits[0, :-1][answer].float().softmax(-1) for model in (target, draft))
        total += torch.minimum(p, q.to(p.device)).sum().item()
        count += int(answer.sum())
    return total / count
