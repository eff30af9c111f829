"""Keys and values of an EAGLE layer, and the layer over them: captured on a CPU, where calls outlast the work."""

import functools

import torch
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from hf_efficient.kernels.replay.function import CapturedFunction
from hf_efficient.kernels.replay.likeliest import likeliest


FIRST_TOKENS = 256  # room of a new cache
MAX_CAPTURED_TOKENS = 128  # of all sequences: more are read eagerly


class EagleCache:
    """Keys and values of `rows` sequences, for `heads`, an `EagleLayer` bound to its target. The first `tree` columns
    hold drafted nodes, the others accepted tokens. branches: guesses that follow each token."""

    def __init__(self, heads, rows: int, tree: int, branches: int):
        self.heads, self.tree, self.branches = heads, tree, branches
        shape = (rows, heads.heads[1], tree, heads.head_dim)
        self.keys, self.values = heads.fuse.new_zeros(shape), heads.fuse.new_zeros(shape)
        self._row = torch.arange(rows, device=heads.fuse.device)[:, None]
        self.reserve(FIRST_TOKENS)

    @property
    def columns(self) -> int:
        return self.keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """Makes room for so many accepted tokens a sequence."""
        if self.tree + tokens > self.columns:
            more = self.tree + (1 << int(tokens - 1).bit_length()) - self.columns
            self.keys, self.values = (pad(states, (0, 0, 0, more)) for states in (self.keys, self.values))
            self._turns = self.heads.turns(torch.arange(self.columns, device=self.keys.device))
            forward = functools.partial(self._forward, self._attend_grouped)
            self._captures = {last: CapturedFunction(functools.partial(forward, last)) for last in (False, True)}

    def copy(self, other: "EagleCache", rows: list[int]) -> None:
        """Takes over `rows` of another cache with the same `tree`."""
        self.reserve(other.columns - self.tree)
        for own, states in ((self.keys, other.keys), (self.values, other.values)):
            own[:, :, : other.columns] = states[rows]

    def read(self, numbers, mask, features, temperature, last: bool):
        """Runs the layer on tokens, and keeps their keys and values.

        Args:
            numbers: int64 [3, rows, width]: the tokens, their positions, and the columns they are kept in.
            mask: float32 [rows, 1, width, columns], -inf at the columns that a token does not attend to.
            features: [rows, width, hidden_size * (1, or 1 + layers)], that predicted the tokens.
            temperature: float [1].
            last: return only what follows the last token.
        Returns, for each token, the next feature [rows, width or 1, hidden_size] and its `branches` most probable
        guesses, best first: probabilities float32 and indices among the draft tokens int64, [rows, width or 1,
        branches]. The next call may overwrite them.
        """
        if numbers[0].numel() > MAX_CAPTURED_TOKENS:
            return self._forward(self._attend, last, numbers, mask, features, temperature)
        mask = mask.repeat(1, 1, self.heads.heads[0] // self.heads.heads[1], 1)
        return self._captures[last](numbers, mask, features, temperature)

    def _attend(self, query, mask):
        return scaled_dot_product_attention(query, self.keys, self.values, mask.to(query.dtype), enable_gqa=True)

    def _attend_grouped(self, query, mask):
        """The same in operators that can be captured. The queries of one key head are neighbours, as in `mask`."""
        heads = self.heads
        grouped = query.reshape(len(query), heads.heads[1], -1, heads.head_dim) * heads.head_dim**-0.5
        scores = (grouped @ self.keys.transpose(-1, -2)).float() + mask
        return (scores.softmax(-1).to(query.dtype) @ self.values).reshape(query.shape)

    @torch.no_grad()
    def _forward(self, attend, last: bool, numbers, mask, features, temperature):
        heads, (tokens, positions, columns) = self.heads, numbers
        x = heads.inputs(heads.embed(tokens), features)
        query, key, value = heads.project(x, *(embedding(positions, turns) for turns in self._turns))
        for states, new in ((self.keys, key), (self.values, value)):
            states.transpose(1, 2)[self._row, columns] = new.transpose(1, 2)
        following = heads.outputs(x, attend(query, mask))
        following = following[:, -1:] if last else following
        scores = heads.logits(following.flatten(0, 1)).float() / temperature
        best = likeliest(scores, self.branches)
        return following, *(values.view(*following.shape[:2], -1) for values in best)
