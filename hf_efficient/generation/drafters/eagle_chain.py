"""The layer of EAGLE heads that guess one continuation, over keys and values of its own: captured, on a CPU."""

import numpy as np
import torch
from torch.nn.functional import embedding, pad

from hf_efficient.kernels.attention.api import flash_attn_with_kvcache
from hf_efficient.kernels.replay.function import CapturedFunction
from hf_efficient.kernels.replay.likeliest import likeliest


FIRST_TOKENS = 256  # room of a new cache
MAX_CAPTURED_WIDTH, MAX_CAPTURED_TOKENS = 16, 128  # of a sequence, and of all: more are read eagerly


class EagleChain:
    """Keys and values of `rows` sequences, for `heads`, an `EagleLayer` bound to its target. Drafted tokens stand
    behind accepted ones, until the next accepted ones take their place. branches: guesses that follow each token."""

    def __init__(self, heads, rows: int, branches: int):
        self.heads, self.branches = heads, branches
        shape = (rows, 0, heads.heads[1], heads.head_dim)
        self.keys, self.values = heads.fuse.new_zeros(shape), heads.fuse.new_zeros(shape)
        self.reserve(FIRST_TOKENS)

    @property
    def columns(self) -> int:
        return self.keys.shape[1]

    def reserve(self, tokens: int) -> None:
        """Makes room for so many tokens a sequence, accepted and drafted."""
        if tokens > self.columns:
            more = (1 << int(tokens - 1).bit_length()) - self.columns
            self.keys, self.values = (pad(states, (0, 0, 0, 0, 0, more)) for states in (self.keys, self.values))
            self._turns = self.heads.turns(torch.arange(self.columns))
            self._draft_tokens = self.heads.draft_tokens[:, None]
            functions = {"read": self._read, "chain": self._chain}
            self._captures = {name: CapturedFunction(function) for name, function in functions.items()}

    def copy(self, other: "EagleChain", rows: list[int]) -> None:
        """Takes over `rows` of another cache."""
        self.reserve(other.columns)
        for own, states in ((self.keys, other.keys), (self.values, other.values)):
            own[:, : other.columns] = states[rows]

    def read(self, tokens: np.ndarray, counts: np.ndarray, lengths: np.ndarray, features, temperature: np.ndarray):
        """Runs the layer on tokens, and keeps their keys and values.

        Args:
            tokens: int64 [rows, width], of which each sequence has the first `counts` [rows].
            lengths: [rows], tokens of each sequence before these.
            features: [rows, width, hidden_size * (1 + layers)], that predicted the tokens.
            temperature: float32 [1].
        Returns, of what follows the last token of each sequence, the feature [rows, 1, hidden_size] and the `branches`
        most probable guesses, best first: probabilities float32 and indices among the draft tokens int64, [rows,
        branches]. The next call may overwrite them.
        """
        rows, width = tokens.shape
        numbers = np.array([tokens, lengths[:, None] + np.arange(width)])
        last = np.arange(rows) * width + np.minimum(np.maximum(counts, 1), width) - 1
        is_small = width <= MAX_CAPTURED_WIDTH and rows * width <= MAX_CAPTURED_TOKENS
        read = self._captures["read"] if is_small else self._read
        return read(*_tensors(numbers, last, lengths.astype(np.int32), temperature), features)

    def chain(self, tokens: np.ndarray, lengths: np.ndarray, features, temperatures: np.ndarray):
        """Runs the layer on one token of each sequence, then on its likeliest guess, and so on, without the host
        between them.

        Args:
            tokens: int64 [rows], the first guesses.
            lengths: [rows], tokens of each sequence before these.
            features: [rows, 1, hidden_size], that predicted them.
            temperatures: float32 [depth].
        Returns the guesses at each depth as `read` does: probabilities and indices, [rows, branches] each.
        """
        positions = lengths + np.arange(len(temperatures))[:, None]
        chain = self._captures["chain"] if len(tokens) <= MAX_CAPTURED_TOKENS else self._chain
        numbers = tokens[:, None], positions[..., None], positions.astype(np.int32), temperatures
        return chain(*_tensors(*numbers), features)

    def _read(self, numbers, last, lengths, temperature, features):
        return self._forward(*numbers, lengths, temperature, features, last)

    def _chain(self, tokens, positions, lengths, temperatures, features):
        found = []
        for level in range(len(positions)):
            asked = tokens, positions[level], lengths[level], temperatures[level : level + 1]
            features, *best = self._forward(*asked, features)
            tokens = embedding(best[1][:, :1], self._draft_tokens)[..., 0]
            found.append(best)
        return found

    @torch.no_grad()
    def _forward(self, tokens, positions, lengths, temperature, features, last=None):
        """The next feature, and the best guesses, after the tokens with indices `last` of all; None: after each."""
        heads = self.heads
        x = heads.inputs(heads.embed(tokens), features)
        states = heads.project(x, *(embedding(positions, turns) for turns in self._turns))
        query, key, value = (each.transpose(1, 2) for each in states)
        attended = flash_attn_with_kvcache(query, self.keys, self.values, key, value, lengths, causal=True).flatten(2)
        if last is not None:
            x, attended = (embedding(last[:, None], each.flatten(0, 1)) for each in (x, attended))
        following = heads.outputs(x, attended.unflatten(2, (-1, heads.head_dim)).transpose(1, 2))
        scores = heads.logits(following.flatten(0, 1)).float() / temperature
        return following, *likeliest(scores, self.branches)


def _tensors(*numbers: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(each) for each in numbers]
