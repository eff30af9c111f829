"""How surprising each token of a text is to a causal language model, after a context that grows."""

import copy
import math

import torch
from torch.nn import functional

from hf_efficient.integrations.transformers_compat import cache_name


CHUNK = 512  # tokens of one forward that only adds to the context
BATCH_TOKENS = 2048  # of one forward over several documents, padding counted


class Context:
    """The tokens that a model has read, in its cache.

    Where they would pass the model's positions, the oldest ones after `head` are forgotten: half the positions stay.

    Args:
        model: a causal language model with a cache.
        head: token ids that always stay in front.
        positions: the most tokens that the model sees at once; None where it has no limit.
    """

    def __init__(self, model, head: list[int], positions: int | None):
        self.model, self.head, self.positions = model, head, positions
        self._start()

    def _start(self) -> None:
        self.tokens, self.cache, self.last = [], None, None
        if self.head:
            self._run(self.head)

    def surprisal(self, tokens: list[int]) -> torch.Tensor:
        """-log p of every token after the context and the tokens before it: float32 [len(tokens)], nats, on the CPU.

        The context does not change. A token without any before it gets the log of the vocabulary's size. If there are
        more tokens than the model has positions, each one is predicted from the last ones that fit.
        """
        if self.positions is not None and len(tokens) > (room := self.positions - len(self.head)):
            step, parts = max(room // 2, 1), []
            for start in range(0, len(tokens), step):
                first = max(start + step - room, 0)
                parts.append(self.surprisal(tokens[first : start + step])[start - first :])
            return torch.cat(parts)
        self._make_room(len(tokens))
        last, logits = self.last, self._forward(tokens, copy.deepcopy(self.cache)).logits[0]
        if last is None:
            last = torch.zeros_like(logits[0])
        before = torch.cat([last[None], logits[:-1]]).float()
        return functional.cross_entropy(before, torch.tensor(tokens, device=before.device), reduction="none").cpu()

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens to the context."""
        step = CHUNK if self.positions is None else max(min(CHUNK, (self.positions - len(self.head)) // 2), 1)
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            self._make_room(len(part))
            self._run(part)
            self.tokens += part

    def _make_room(self, more: int) -> None:
        if self.positions is None or len(self.head) + len(self.tokens) + more <= self.positions:
            return
        keep = min((self.positions - len(self.head)) // 2, self.positions - len(self.head) - more)
        tokens = self.tokens[-keep:] if keep > 0 else []
        self._start()
        if tokens:
            self._run(tokens)
            self.tokens = tokens

    def _run(self, tokens: list[int]) -> None:
        output = self._forward(tokens, self.cache)
        if output.get(cache_name()) is None:
            raise ValueError(f"{type(self.model).__name__} has no cache: it does not read text from left to right")
        self.cache, self.last = output[cache_name()], output.logits[0, -1].clone()

    def _forward(self, tokens: list[int], cache):
        inputs = {"input_ids": torch.tensor([tokens], device=self.model.device), cache_name(): cache}
        return self.model(**inputs, use_cache=True)


def surprisal_after(
    model, before: list[list[int]], tokens: list[int], head: list[int], positions: int | None
) -> list[float]:
    """Mean -log p of `tokens` after each text of `before`, in nats. Where both do not fit, the text's end stays."""
    room = None if positions is None else positions - len(head) - len(tokens)
    texts = [head + (text if room is None else text[max(len(text) - room, 0) :]) for text in before]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found, batch = {}, []
    for place, index in enumerate(order):
        batch.append(index)
        longest = len(texts[order[min(place + 1, len(order) - 1)]]) + len(tokens)  # if the next one joins
        if place + 1 == len(order) or longest * (len(batch) + 1) > BATCH_TOKENS:
            found |= zip(batch, _mean_surprisal(model, [texts[index] for index in batch], tokens))
            batch = []
    return [found[index] for index in range(len(texts))]


def _mean_surprisal(model, texts: list[list[int]], tokens: list[int]) -> list[float]:
    width = max(map(len, texts)) + len(tokens)
    rows = [text + tokens + [tokens[-1]] * (width - len(text) - len(tokens)) for text in texts]  # padding comes last
    mask = [[1] * (len(text) + len(tokens)) + [0] * (width - len(text) - len(tokens)) for text in texts]
    device, target = model.device, torch.tensor(tokens)
    rows, mask = torch.tensor(rows, device=device), torch.tensor(mask, device=device)
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    found = []
    for row, text in zip(logits, texts):
        if text:
            before = row[len(text) - 1 : len(text) + len(tokens) - 1].float()
            found.append(functional.cross_entropy(before, target.to(device)).item())
        else:
            found.append(math.log(row.shape[-1]))
    return found
