"""A small model that drafts for a target: distilled on what the target writes and on what it drafts itself."""

import time
from pathlib import Path

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.compression.distillation import learn
from hf_efficient.compression.distillation.written import answers
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.structured_pruning import prune_structure
from hf_efficient.configs.checks import check, is_integer
from hf_efficient.files import atomic_checkpoint
from hf_efficient.generation.training.prompts import default_prompts


BATCH_ROWS = 8  # answers a step
HELD_OUT = 20  # one prompt in so many is held out: acceptance is measured on the answers to them
ON_POLICY = 0.5  # share of the steps in which the draft writes
LENGTH = 512  # tokens of a prompt with its answer, at most
logger = logging.get_logger(__name__)


def check_draft(model, draft, layers: int | None) -> None:
    """Raises ValueError for a draft model that `train_draft` cannot make."""
    if (draft is None) == (layers is None):
        raise ValueError(f"draft={draft!r:.40}, layers={layers}: kind='model' needs one of them")
    most = model.config.get_text_config().num_hidden_layers - 1
    is_fewer = layers is None or (is_integer(layers, 1) and layers <= most)
    check(is_fewer, "layers", layers, f"an integer from 1 to {most}")
    if draft is model:
        raise ValueError("draft is the target itself: give a smaller model")


def train_draft_model(
    model,
    tokenizer,
    output: Path,
    folder: Path,
    progress,
    *,
    draft,
    layers: int | None,
    prompts: list[str] | None,
    num_tokens: int,
    epochs: int,
    minutes: float | None,
    max_new_tokens: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    describe,
) -> nn.Module:
    """`train_draft` with kind="model", which documents the arguments. `progress` keeps in `folder` how many minutes
    training has, so that an interrupted run goes on."""
    start = time.perf_counter()
    given = default_prompts(seed) if prompts is None else prompts
    given = [given[i % len(given)] for i in range(-(-num_tokens // max_new_tokens))]
    held_out, learned = given[::HELD_OUT], [p for i, p in enumerate(given) if i % HELD_OUT] or given
    if draft is None:
        draft = prune_structure(model, "shape", shape={"num_hidden_layers": layers}, tokenizer=tokenizer)
    is_late = None if minutes is None else lambda: time.perf_counter() - start > 30 * minutes
    rows = answers(model, tokenizer, learned, LENGTH, max_new_tokens, seed, folder, batch_size, is_late)
    batch = min(BATCH_ROWS, len(rows))
    budget = {"steps": max(1, epochs * len(rows) // batch)}
    if minutes is not None:
        left = minutes - (time.perf_counter() - start) / 60
        budget = {"minutes": progress.get("training minutes") or max(0.01, left)}
        progress.set("training minutes", budget["minutes"])
    how = dict(sequence_length=LENGTH, divergence="jensen_shannon", learning_rate=learning_rate, seed=seed)
    options = RecoveryOptions(batch_size=batch, checkpoint_dir=folder, **how, **budget)
    result = learn(draft, model, rows, [], options, on_policy=ON_POLICY)
    with atomic_checkpoint(output) as new:  # before it is measured: of the held-out answers none may be left
        draft.save_pretrained(new)
        tokenizer.save_pretrained(new)
        if describe is not None:
            describe(draft, new)
    draft.expected_acceptance = expected_acceptance(draft, model, tokenizer, held_out, max_new_tokens, seed)
    logger.info(f"draft model: {result['steps']} steps, expected acceptance {draft.expected_acceptance:.3f}")
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
