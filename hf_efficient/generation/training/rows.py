"""The answers that draft heads are trained on, as rows of tokens and hidden states, and files that hold tensors."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_efficient.files import atomic_write


def save_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file atomically."""
    with atomic_write(path) as partial:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial, metadata)


class Row:
    """One answer with its prompt.

    tokens: int64 [n]. hidden: [n - 1, hidden_size * (1 + layers)]; the i-th predicted token i + 1; None where they were
    not kept. prompt: how many of the tokens are the prompt.
    """

    def __init__(self, tokens: torch.Tensor, hidden: torch.Tensor | None, prompt: int):
        self.tokens, self.hidden, self.prompt = tokens, hidden, prompt


def load_rows(files: list[Path]) -> list[Row]:
    """All rows of the files that `text.generate_text` wrote. Hidden states are memory-mapped."""
    rows = []
    for file in files:
        shard = load_file(file)
        lengths = shard["lengths"].tolist()
        tokens = shard["tokens"].split(lengths)
        hidden = [None] * len(lengths)
        if "hidden" in shard:
            hidden = shard["hidden"].split([length - 1 for length in lengths])
        rows += [Row(*parts) for parts in zip(tokens, hidden, shard["prompts"].tolist())]
    return rows


def frequent_tokens(rows: list[Row], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` most frequent tokens of the answers, int64, most frequent first; ties by id."""
    answers = torch.cat([row.tokens[row.prompt :] for row in rows])
    return torch.bincount(answers, minlength=vocab_size).argsort(descending=True, stable=True)[:count].clone()


def split_rows(rows: list[Row], every: int) -> tuple[list[Row], list[Row]]:
    """The rows of every `every`-th prompt, and the others. Answers to one prompt stay together, as they may be alike,
    unless there is only one prompt."""
    by_prompt = {}
    for row in rows:
        by_prompt.setdefault(tuple(row.tokens[: row.prompt].tolist()), []).append(row)
    groups = list(by_prompt.values()) if len(by_prompt) > 1 else [[row] for row in rows]
    parts = groups[::every], (group for i, group in enumerate(groups) if i % every)
    return tuple([row for group in part for row in group] for part in parts)
