"""Comparing what a session gave here with what transformers alone gives."""

import re

import torch


TIE = 2e-4  # float32 logits of the tiny models reach 30; sums in another order move them by up to some 1e-5


# What speculation refuses by name where transformers' plain loop, which it is compared with, answers.
REFUSED = re.compile(
    r"model=Shifted\w+: it overrides a step of transformers' decoding loop"
    r"|model=\w+: layer \d+ of its config took no part in the prompt's forward"
)


def difference(session: dict, ours: list[dict], theirs: list[dict]) -> str | None:
    """The first difference that is no tie between two tokens, as text."""
    calls = [step[1] for step in session["steps"] if step[0] == "call"]
    for index, (options, mine, other) in enumerate(zip(calls, ours, theirs, strict=True)):
        if mine.get("error") == "ValueError" and REFUSED.match(mine["text"]):
            continue
        if "error" in mine or "error" in other:
            if mine.get("error") != other.get("error"):
                return (
                    f"call {index} {options}: ours {mine.get('text', 'answers')}, theirs {other.get('text', 'answers')}"
                )
            continue
        if text := _tokens_differ(options, mine["sequences"], other):
            return f"call {index} {options}: {text}"
    return None


def _tokens_differ(options: dict, ours: torch.Tensor, theirs: dict) -> str | None:
    expected, scores = theirs["sequences"], theirs["scores"]
    if ours.dtype != expected.dtype:
        return f"{ours.dtype} instead of {expected.dtype}"
    if torch.equal(ours, expected):
        return None
    start = expected.shape[1] - len(scores)
    for row in range(len(expected)):
        width = min(ours.shape[1], expected.shape[1])
        places = (ours[row, :width] != expected[row, :width]).nonzero().flatten().tolist()
        if not places:
            continue
        step = places[0] - start
        best = scores[step][row]
        if step < 0 or options.get("do_sample") or best[expected[row, places[0]]] - best[ours[row, places[0]]] > TIE:
            return f"row {row} from token {step}: {ours[row].tolist()} instead of {expected[row].tolist()}"
    if ours.shape != expected.shape and not any((a != b).any() for a, b in zip(ours, expected) if len(a) == len(b)):
        return f"{tuple(ours.shape)} instead of {tuple(expected.shape)}"
    return None
