"""`warm_up` compiles and captures in advance what a model would compile and capture during its first generations."""

from collections.abc import Sequence

import torch

from hf_efficient.generation import model_state
from hf_efficient.generation.model_traits import reads_encoder
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay.captured_forward import (
    EAGER_FORWARDS,
    MAX_TOKENS,
    PACKED_WIDTHS,
    WIDTHS,
    why_not_captured,
)
from hf_efficient.generation.speculation.proposal import MAX_NODES


PROMPTS = (8, 24, 48, 100, 192, 320)  # tokens: one length for each kernel that linear layers choose by their rows
PROMPT_READS = 2  # the first runs eagerly, the second is captured


def warm_up(
    model,
    batch_sizes: Sequence[int] = (1,),
    widths: Sequence[int] = (1,),
    max_length: int = 512,
    prompt_tokens: Sequence[int] = PROMPTS,
) -> int:
    """Runs `model` once at each size, so that later `generate()` calls compile no kernel and capture no forward of new
    tokens. Prompts of other lengths than `prompt_tokens` are captured when they occur for the second time.

    On a CUDA device a new size compiles Triton kernels, 0.5 to 2 seconds each, and captures a CUDA graph. On a CPU the
    drafts of several sequences are verified without padding: all such sizes up to `max(widths)` tokens per sequence are
    captured, at most 15. Captures for drafters that read hidden states are not made, because they use another cache.

    Args:
        model: a causal LM that the native loop serves (`hf_efficient.report(model)` says whether it does).
        batch_sizes: numbers of sequences in later calls.
        widths: new tokens of a sequence in a forward: 1 for plain decoding, up to 1 + drafted tokens for speculation.
        max_length: tokens of the longest sequence, prompt included.
        prompt_tokens: lengths of prompts; those above max_length are left out.

    Returns:
        how many forwards of these numbers of sequences are captured now; some sizes share one.

    Raises:
        ValueError: a model whose forwards are not captured, or sizes that are too large for a capture.
    """
    if reads_encoder(model):
        raise ValueError(f"model={type(model).__name__}: warm_up runs decoder-only models")
    if (reason := why_not_captured(model)) is not None:
        raise ValueError(f"model={type(model).__name__}: {reason}")
    for rows in batch_sizes:
        for width in widths:
            if not (0 < rows and 0 < width <= WIDTHS[-1] and rows * width <= MAX_TOKENS):
                raise ValueError(
                    f"batch_sizes={tuple(batch_sizes)} and widths={tuple(widths)}: allowed are widths from 1 to "
                    f"{WIDTHS[-1]} of at most {MAX_TOKENS} tokens in all"
                )
    version = model_state.current(model)
    if not version.is_capturable:
        raise ValueError(f"model={type(model).__name__}: its attention does not read the pages of a cache")
    captures = 0
    for rows in sorted(batch_sizes, reverse=True):  # the cache of the largest batch holds the others
        entry = version.pool.take(model.config, rows, max_length + MAX_NODES + 1)
        with torch.inference_mode(False), torch.no_grad():
            runner = RaggedModel(model, entry.cache, max_length, None, None, entry.captured, entry.is_capturable)
            for length in sorted(tokens for tokens in prompt_tokens if tokens < max_length) or (1,):
                for _ in range(PROMPT_READS):
                    entry.cache.rewind([0] * len(entry.cache.cache_seqlens))
                    _read_prompt(runner, rows, length)
            sizes = _sizes(rows, sorted(set(widths)), rows > 1 and runner.packs)
            for counts in sizes[:1] * EAGER_FORWARDS + sizes:
                tokens = torch.zeros(rows, max(counts), dtype=torch.int64, device=model.device)
                runner(tokens, [0] * rows, counts=counts)
                runner.rewind([0] * rows)
            captures += 0 if runner.captured is None else runner.captured.count(rows)
        version.pool.put(entry, runner.captured)
    return captures


def _sizes(rows: int, widths: list[int], packs: bool) -> list[list[int]]:
    """The new tokens of each sequence in the forwards of a batch. packs: drafts of unequal length, and sequences that
    have ended, leave no padding."""
    sizes, most = [[width] * rows for width in widths], max(widths, default=1)
    if packs and most > 1:
        totals = [tokens for tokens in PACKED_WIDTHS if tokens < rows * most]
        sizes += [[min(most, max(0, tokens - row * most)) for row in range(rows)] for tokens in totals]
    return sizes


def _read_prompt(runner: RaggedModel, rows: int, length: int) -> None:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=runner.model.device)
    positions = torch.arange(length, device=ids.device).expand(rows, -1)
    kwargs = {"attention_mask": None, "position_ids": positions}
    if runner.limits_logits:
        kwargs["logits_to_keep"] = 1
    runner.prefill(ids, runner.model.generation_config, kwargs)
