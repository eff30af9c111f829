"""Text for distillation that a model writes: answers of the teacher to prompts, and continuations by the student."""

import hashlib
import json
from collections.abc import Callable, Sequence

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_efficient.compression.stored_text import stored_text
from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.model_traits import check_ragged
from hf_efficient.generation.training.prompts import check_prompts
from hf_efficient.observers.hooks import modes_kept


_ROWS = 32  # texts that are written at once
_MOST_REPEATED = 0.5  # an answer in which more of the 4-token runs occurred before is left out
_RUN = 4


def continuations(model, begun: Sequence[torch.Tensor], new: int, seed: int) -> list[dict]:
    """What `model` samples at temperature 1 after each of the beginnings int64 [tokens], up to `new` tokens.

    Returns:
        for each "input_ids" and "answer" (1 where the model wrote a token), int64 [tokens], on the CPU.
    """
    rows, ends = [], model.generation_config.eos_token_id
    for start in range(0, len(begun), _ROWS):
        ids, mask = _left_padded(begun[start : start + _ROWS], model.device)
        ids = sample(model, ids, mask, new, seed * 1_000_003 + start)
        written = torch.ones_like(ids[:, mask.shape[1] :])
        if ends is not None and written.shape[1]:  # what comes after an end is padding
            ended = torch.isin(ids[:, mask.shape[1] :], torch.tensor(ends, device=ids.device)).long().cumsum(1)
            written[:, 1:] = (ended[:, :-1] == 0).long()
        present = torch.cat([mask, written], 1) == 1
        answer = torch.cat([torch.zeros_like(mask), written], 1)
        for each in zip(ids.cpu(), answer.cpu(), present.cpu()):
            rows.append({"input_ids": each[0][each[2]], "answer": each[1][each[2]]})
    return rows


@torch.no_grad()
def sample(model, prompts: torch.Tensor, mask: torch.Tensor, new: int, seed: int) -> torch.Tensor:
    """int64 [B, P + new at most] that begins with `prompts` [B, P], which `mask` [B, P] pads on the left: sampled from
    the distributions of `model` as they are, by the native loop where it takes the model."""
    own, defaults = {}, model.generation_config
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
        eos_token_id=defaults.eos_token_id, pad_token_id=defaults.pad_token_id or 0,
    )  # fmt: skip
    try:
        check_ragged(model, len(prompts), "model")
        own["custom_generate"] = speculative_generate
    except ValueError:
        pass  # transformers' own loop
    devices = [prompts.device] if prompts.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % (1 << 63))
        model.generation_config = settings  # of which `generate` takes what `settings` leaves out: penalties, ...
        try:
            with modes_kept(model):
                return model.eval().generate(prompts, attention_mask=mask, generation_config=settings, **own)
        finally:
            model.generation_config = defaults


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
        ValueError: a prompt has no tokens, an answer would leave the teacher's learned positions, nothing is left, or
            a folder with the text of another run.
    """
    encoded = _encode(tokenizer, prompts, length)
    check_prompts(teacher, prompts, [len(row) for row in encoded], new)
    arguments = {"prompts": hashlib.sha256(json.dumps(encoded).encode()).hexdigest(), "sequence_length": length}
    arguments |= {"max_new_tokens": new, "seed": seed, "batch_size": batch_size}
    write = lambda: _written(teacher, encoded, length, new, seed, batch_size, is_late)  # noqa: E731
    stored = stored_text(folder, "answers", teacher, arguments, write)
    return _rows(stored["tokens"], stored["lengths"], stored["prompts"])


def _written(teacher, encoded, length, new, seed, batch_size, is_late) -> dict[str, torch.Tensor]:
    """The tokens of all rows one after the other, their lengths, and how many tokens of each are the prompt's."""
    rows, seen = [], set()
    for start in logging.tqdm(range(0, len(encoded), batch_size), desc="writing answers"):
        for row in continuations(teacher, encoded[start : start + batch_size], new, seed * 1_000_003 + start):
            own = row["input_ids"][row["answer"] == 1].tolist()
            runs = {tuple(own[i : i + _RUN]) for i in range(max(1, len(own) - _RUN + 1))}
            if own and len(runs - seen) >= _MOST_REPEATED * max(1, len(own) - _RUN + 1):
                seen |= runs
                rows.append((row["input_ids"][:length], int((row["answer"] == 0).sum())))
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


def _left_padded(rows: Sequence, device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = torch.as_tensor(row), 1
    return ids.to(device), mask.to(device)


def _encode(tokenizer, prompts: list[str], length: int) -> list[list[int]]:
    if getattr(tokenizer, "chat_template", None) is not None:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        encoded = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    else:
        encoded = tokenizer(prompts)["input_ids"]
    return [row[: max(1, length // 2)] for row in encoded]
