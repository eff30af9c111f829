"""Text for distillation that a model writes: answers of the teacher to prompts, and continuations by the student."""

import hashlib
import json
from collections.abc import Callable

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_efficient.compression.stored_text import stored_text
from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.model_traits import check_ragged


_ROWS = 32  # answers that are written at once
_MOST_REPEATED = 0.5  # an answer in which more of the 4-token runs occurred before is left out
_RUN = 4


def continuations(model, tokens: torch.Tensor, lengths: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """What `model` samples at temperature 1 after the first `lengths` int64 [B] tokens of `tokens` int64 [B, T], up to
    T tokens in all (less, where some begin later than others).

    Returns:
        "input_ids", "attention_mask" and "answer" (1 where the model wrote a token), int64 [B, T'].
    """
    count = int(lengths.max())
    prompts = torch.stack([torch.roll(row, count - n) for row, n in zip(tokens, lengths.tolist())])[:, :count]
    mask = torch.arange(count, device=tokens.device) >= count - lengths[:, None]
    ids = sample(model, prompts, mask.long(), max(1, tokens.shape[1] - count), seed)
    return _batch(ids, mask.long(), model.generation_config.eos_token_id)


@torch.no_grad()
def sample(model, prompts: torch.Tensor, mask: torch.Tensor, new: int, seed: int, greedy: bool = False):
    """int64 [B, P + new at most] that begins with `prompts` [B, P], which `mask` [B, P] pads on the left, by the native
    loop where it takes the model."""
    settings = dict(max_new_tokens=new, pad_token_id=model.generation_config.pad_token_id or 0)
    settings |= {} if greedy else dict(temperature=1.0, top_k=0, top_p=1.0)
    settings = GenerationConfig(do_sample=not greedy, eos_token_id=model.generation_config.eos_token_id, **settings)
    own = {}
    try:
        check_ragged(model, len(prompts), "model")
        own["custom_generate"] = speculative_generate
    except ValueError:
        pass  # transformers' own loop
    devices = [prompts.device] if prompts.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return model.generate(prompts, attention_mask=mask, generation_config=settings, **own)


def answers(
    teacher,
    tokenizer,
    prompts: list[str],
    length: int,
    new: int,
    seed: int,
    folder=None,
    batch_size: int = _ROWS,
    is_late: Callable[[], bool] | None = None,
) -> list[dict]:
    """Rows that `teacher` writes in answer to `prompts` (sequence-level distillation,
    https://arxiv.org/abs/1606.07947), sampled at temperature 1. Answers that mostly repeat themselves or others are
    left out, and what is longer than `length` tokens is cut.

    Args:
        new: tokens of an answer, at most.
        folder: keeps what was written, and it is taken from there another time.
        batch_size: answers that are written at once.
        is_late: the first batch after which it returns True is the last.

    Returns:
        "input_ids" and "answer" (1 where a token was written), int64 [tokens], padded to one length on the right by
        `pad` later.

    Raises:
        ValueError: nothing is left, or a folder with the text of another run.
    """
    encoded = _encode(tokenizer, prompts, length)
    arguments = {"prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(), "sequence_length": length}
    arguments |= {"max_new_tokens": new, "seed": seed, "batch_size": batch_size}
    write = lambda: _written(teacher, encoded, length, new, seed, batch_size, is_late)  # noqa: E731
    stored = stored_text(folder, "answers", teacher, arguments, write)
    return _rows(stored["tokens"], stored["lengths"], stored["prompts"])


def _written(teacher, encoded, length, new, seed, batch_size, is_late) -> dict[str, torch.Tensor]:
    """The tokens of all rows one after the other, their lengths, and how many tokens of each are the prompt's."""
    rows, seen = [], set()
    for start in logging.tqdm(range(0, len(encoded), batch_size), desc="writing answers"):
        part = encoded[start : start + batch_size]
        batch = _left_padded(part, teacher.device)
        ids = sample(teacher, *batch, new, seed * 1_000_003 + start)
        batch = _batch(ids, batch[1], teacher.generation_config.eos_token_id)
        for tokens, present, answer in zip(*(batch[key].cpu() for key in ("input_ids", "attention_mask", "answer"))):
            own = tokens[answer == 1].tolist()
            runs = {tuple(own[i : i + _RUN]) for i in range(max(1, len(own) - _RUN + 1))}
            if own and len(runs - seen) >= _MOST_REPEATED * max(1, len(own) - _RUN + 1):
                seen |= runs
                rows.append((tokens[present == 1][:length], int((answer == 0)[present == 1].sum())))
        if is_late is not None and is_late():
            break
    if not rows:
        raise ValueError(f"{type(teacher).__name__} repeats itself in every answer that it writes: give other prompts")
    tokens, lengths = torch.cat([row for row, _ in rows]), torch.tensor([len(row) for row, _ in rows])
    return {"tokens": tokens, "lengths": lengths, "prompts": torch.tensor([prompt for _, prompt in rows])}


def pad(rows: list[dict]) -> dict[str, torch.Tensor]:
    """The batch of rows of different lengths, padded on the right, with an "attention_mask" where there is padding."""
    lengths = [len(row["input_ids"]) for row in rows]
    padded = {
        key: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row[key]) for row in rows], batch_first=True)
        for key in rows[0]
    }
    if len(set(lengths)) > 1:
        padded["attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return padded


def _rows(tokens: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor) -> list[dict]:
    found = []
    for row, begin in zip(tokens.split(lengths.tolist()), prompts.tolist()):
        found.append({"input_ids": row, "answer": (torch.arange(len(row)) >= begin).long()})
    return found


def _batch(ids: torch.Tensor, mask: torch.Tensor, ends) -> dict[str, torch.Tensor]:
    """The batch of sequences that were written after left-padded prompts: what comes after an end is padding."""
    count = mask.shape[1]
    written = torch.ones_like(ids[:, count:])
    if ends is not None and written.shape[1]:
        ended = torch.isin(ids[:, count:], torch.tensor(ends, device=ids.device)).long().cumsum(1)
        written[:, 1:] = (ended[:, :-1] == 0).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([mask, written], 1),
        "answer": torch.cat([torch.zeros_like(mask), written], 1),
    }


def _left_padded(rows: list[list[int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)


def _encode(tokenizer, prompts: list[str], length: int) -> list[list[int]]:
    if getattr(tokenizer, "chat_template", None) is not None:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    else:
        encoded = tokenizer(prompts)["input_ids"]
    return [row[: max(1, length // 2)] for row in encoded if row]
