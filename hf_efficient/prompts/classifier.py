"""LLMLingua-2: a token classifier predicts the probability that each token of a prompt stays.

Published checkpoints are XLM-RoBERTa or multilingual BERT with a token classification head, label 1 for what stays
(https://arxiv.org/abs/2403.12968).
"""

import torch

from hf_efficient.prompts import small_model
from hf_efficient.prompts.groups import Group, ends_sentence
from hf_efficient.prompts.selection import Selection
from hf_efficient.prompts.tokens import Word, special_tokens


KEPT_LABEL = 1


def kept_by_classifier(
    model, tokenizer, text: str, ids: list[int], words: list[Word], groups: list[Group], forced: set[int], budget: int
) -> set[int]:
    """The words that stay: all of the fixed groups, and of the others those of the largest mean probability."""
    ends = [False] * len(ids)
    for word in words:
        ends[word.stop - 1] = ends_sentence(text, word)
    kept = probabilities(model, ids, ends, special_tokens(tokenizer), small_model.positions(model, tokenizer))
    selection = Selection(words, groups, forced, budget, None)
    for index, group in enumerate(groups):
        scores = [kept[words[at].first : words[at].stop].mean().item() for at in group.words]
        selection.take(index, group.words, scores)
    return selection.kept


def probabilities(
    model, ids: list[int], ends: list[bool], special: tuple[list[int], list[int]], positions: int | None
) -> torch.Tensor:
    """The probability that each token stays, from windows of as many tokens as the model sees.

    Args:
        model: a token classifier with two labels.
        ids: tokens of the prompt.
        ends: whether a sentence ends with a token. A window ends there, if one ends in its second half.
        special: the token ids that stand before and after a window.
        positions: the most tokens that the model sees at once, special tokens counted; None where it has no limit.

    Returns:
        float32 [len(ids)], on the CPU.
    """
    before, after = special
    size = len(ids) if positions is None else positions - len(before) - len(after)
    found, start = [], 0
    while start < len(ids):
        stop = min(start + size, len(ids))
        if stop < len(ids):
            stop = next((at + 1 for at in range(stop - 1, start + size // 2, -1) if ends[at]), stop)
        window = torch.tensor([before + ids[start:stop] + after], device=model.device)
        logits = model(input_ids=window, attention_mask=torch.ones_like(window)).logits[0]
        found.append(logits.float().softmax(-1)[len(before) : len(before) + stop - start, KEPT_LABEL].cpu())
        start = stop
    return torch.cat(found)
