"""The tree that a layer over the target's features guesses: the layer caches what it has read of accepted tokens."""

from abc import abstractmethod

import numpy as np
import torch

from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.drafters.eagle_cache import EagleCache
from hf_efficient.generation.drafters.eagle_chain import EagleChain
from hf_efficient.generation.drafters.few_bit_matrices import FewBitMatrices
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import best_first, spine_first
from hf_efficient.kernels.replay.recorder import interpreter


BRANCHES = 8  # children of a node that are considered
MIN_REACH = 0.2  # a depth is drafted only where some sequence reaches it with at least this probability
NEW_SHARE = 0.1  # of a step in the running mean of how likely the first guess of a depth is
PREFILL_TOKENS = 2048  # of all sequences, read in one forward
PADDED_WIDTH = 16  # tokens a sequence: up to so many are padded to powers of two, for fewer captures
MAX_CACHES = 4  # one for each number of sequences, which is halved as they end


class EagleTree(DraftHeads):
    """Heads that make the next feature from a token and the feature that predicted it, with attention to all tokens
    before it. The first guess reads the target's features, later ones the heads' own.

    Guesses form the dynamic tree of EAGLE-2 (Li et al. 2024, "EAGLE-2: Faster Inference of Language Models with Dynamic
    Draft Trees"): at each depth the `beam` most probable nodes are continued, and the `nodes` most probable of all
    candidates are proposed.

    Subclasses have a weight `fuse`, in whose dtype and on whose device features are read.

    Attributes:
        beam: nodes continued at each depth, >= 1; `beam = nodes = 1` guesses a chain. May be set between calls. None:
            6, or 1 where a chain is captured, on a CPU.
    """

    fuse: torch.Tensor

    def __init__(self, *arguments, **shape):
        super().__init__(*arguments, **shape)
        self.beam: int | None = None

    @property
    def _width(self) -> int:
        """Nodes continued at each depth."""
        return min(self.beam or 6, BRANCHES, len(self.draft_tokens))

    @abstractmethod
    def _new_cache(self, rows: int, tree: int, branches: int):
        """An empty `EagleCache`, or what has its attributes and methods; an `EagleChain` where `_chains`."""

    @property
    def _chains(self) -> bool:
        """Whether one continuation is guessed over an `EagleChain`, which is slower where nothing is captured."""
        return False

    def _check_target(self, model) -> None:
        if self.beam is not None and (type(self.beam) is not int or self.beam < 1):
            raise ValueError(f"beam={self.beam!r} of the draft heads: must be an integer of at least 1, or None")
        super()._check_target(model)

    def begin(self, sequences, hidden=None) -> None:
        rows, columns = hidden.shape[:2]
        self._beam, self._is_chain = self._width, self._chains  # of this call
        self._sequences, self._lengths, self._root = sequences, np.zeros(rows, np.int64), None
        real = np.ones((rows, columns), bool)
        if sequences.prompt_mask is not None:
            real = sequences.prompt_mask[sequences.live][:, -columns:].bool().cpu().numpy()
        # not read yet: tokens, the features that predicted them, and which of them are no padding
        self._pending = [(sequences.last(columns).cpu().numpy(), hidden, real)]
        self._token_ids = self.draft_tokens.cpu().numpy()
        self._goes_on = np.ones(self.max_tokens)  # how likely the first guess of each depth was lately
        self._cache = self._cache_for(rows)

    def _cache_for(self, rows: int):
        branches = min(BRANCHES, len(self.draft_tokens))
        kind = rows, 0 if self._is_chain else max(1, self._beam * (self.max_tokens - 1))
        cache = self._captures.pop(kind, None) or self._new_cache(*kind, branches)
        self._captures[kind] = cache  # the latest used last
        while len(self._captures) > MAX_CACHES:
            del self._captures[next(iter(self._captures))]
        return cache

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        longest = max(map(len, tokens))
        if longest:
            padded = [new + [0] * (longest - len(new)) for new in tokens]
            real = [[column < len(new) for column in range(longest)] for new in tokens]
            self._pending.append((np.array(padded), hidden, np.array(real)))

    def select(self, rows: list[int]) -> None:
        self._lengths = self._lengths[rows]
        self._root = self._root and tuple(part[rows] for part in self._root)
        self._pending = [tuple(part[rows] for part in parts) for parts in self._pending]
        before, self._cache = self._cache, self._cache_for(len(rows))
        if self._cache is not before:
            self._cache.copy(before, rows)

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        nodes = min(nodes, self.nodes)
        depth = min(self.max_tokens, max(limits), nodes)
        if depth == 0:
            return None
        self._catch_up()
        if self._is_chain:
            return self._propose_chain(depth, limits, nodes)
        features, chances, indices = self._root
        rows, beam = len(features), self._beam
        row, node = np.arange(rows)[:, None], np.arange(beam)
        above = np.full((rows, 1), -1)  # the nodes that are continued: indices among the candidates
        likely = np.ones((rows, 1), np.float32)  # and probabilities of the paths to them
        seen = np.zeros((rows, 1, self._cache.tree), bool)
        tokens, confidence, parents, depths = [], [], [], []
        for level in range(depth):
            confidence.append((chances * likely[..., None]).reshape(rows, -1))
            tokens.append(self._token_ids[indices].reshape(rows, -1))
            parents.append(above.repeat(chances.shape[-1], 1))
            depths += [level + 1] * tokens[-1].shape[1]
            if level + 1 == depth:
                break
            best = (-confidence[-1]).argsort(1, kind="stable")[:, :beam]
            likely = confidence[-1][row, best]
            if likely.sum(1).max() < MIN_REACH:
                break
            above, of = sum(part.shape[1] for part in confidence[:-1]) + best, best // chances.shape[-1]
            seen = seen[row, of]
            seen[:, node, level * beam + node] = True
            positions = np.broadcast_to(self._lengths[:, None] + level, best.shape)
            column = np.broadcast_to(level * beam + node, best.shape)
            features = features.gather(
                1, torch.from_numpy(of).to(features.device)[..., None].expand(-1, -1, features.shape[-1])
            )
            numbers = np.stack([tokens[-1][row, best], positions, column])
            features, chances, indices = self._read(numbers, seen, self._lengths[:, None], features, level + 1)
        candidates = (np.concatenate(parts, 1) for parts in (tokens, confidence, parents))
        return best_first(*candidates, np.array(depths), limits, nodes, self._sequences.device)

    def _propose_chain(self, depth: int, limits: list[int], nodes: int) -> Proposal | None:
        """With a beam of 1: the likeliest guess goes on at each depth, and the others are its siblings."""
        features, chances, indices = self._root
        reach, likeliest = chances[:, 0, 0].max(), 1
        while likeliest < depth and reach >= MIN_REACH:
            reach *= self._goes_on[likeliest]
            likeliest += 1
        depth = likeliest
        if depth > 1:
            self._cache.reserve(self._lengths.max() + depth - 1)
            temperatures = np.array(self.temperatures[1:depth], np.float32)
            deeper = self._cache.chain(self._token_ids[indices[:, 0, 0]], self._lengths, features, temperatures)
            first = ((chances, indices),)
            parts = zip(*first, *((x.numpy()[:, None] for x in best) for best in deeper))
            chances, indices = (np.concatenate(part, 1) for part in parts)
            seen_now = chances[:, 1:, 0].max(0)
            self._goes_on[1:depth] += (seen_now - self._goes_on[1:depth]) * NEW_SHARE
        return spine_first(self._token_ids[indices], chances, limits, nodes, self._sequences.device)

    def _mask(self, seen: np.ndarray | None, reach: np.ndarray) -> np.ndarray:
        """float32 [rows, 1, width, columns] of the first `reach` [rows, width] accepted tokens and the nodes `seen`."""
        cache, (rows, width) = self._cache, reach.shape
        mask = np.full((rows, 1, width, cache.columns), -np.inf, np.float32)
        mask[:, 0, :, cache.tree :][np.arange(cache.columns - cache.tree) < reach[..., None]] = 0
        if seen is not None:
            mask[:, 0, :, : cache.tree][seen] = 0
        return mask

    def _read(self, numbers, seen, reach, features, level: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """`EagleCache.read` of tokens that attend to the first `reach` [rows, width or 1] accepted tokens and to the
        nodes `seen` bool [rows, width, tree]; None for no nodes. level: depth (from 0) of the next guesses."""
        mask = self._mask(seen, np.broadcast_to(reach, numbers.shape[1:]))
        temperature = np.array([self.temperatures[level]], np.float32)
        numbers, mask, temperature = (torch.from_numpy(x).to(self.fuse.device) for x in (numbers, mask, temperature))
        features, chances, indices = self._cache.read(numbers, mask, features, temperature, last=seen is None)
        return features, chances.cpu().numpy(), indices.cpu().numpy()

    def _catch_up(self) -> None:
        """Reads the pending tokens. `_root` then holds, for each sequence: the feature that predicts the next token,
        the probabilities of its guesses, and their indices among the draft tokens."""
        if not self._pending:
            return
        tokens, hidden, real = self._pending[0]
        if len(self._pending) > 1:
            tokens, real = (np.concatenate(parts, 1) for parts in list(zip(*self._pending))[::2])
            hidden = torch.cat([hidden for _, hidden, _ in self._pending], 1)
        hidden, counts = hidden.to(self.fuse), real.sum(1)
        width = counts.max()
        if counts.min() < real.shape[1]:  # the real ones first in a chain, else last
            order = real.argsort(1, kind="stable")[:, -width:]
            if self._is_chain:
                order = (~real).argsort(1, kind="stable")[:, :width]
            index = torch.from_numpy(order).to(hidden.device)[..., None]
            hidden = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
            tokens = np.take_along_axis(tokens, order, 1)
        padding = 0 if width > PADDED_WIDTH else max(4, 1 << int(width - 1).bit_length()) - width
        if padding:
            order = 1 if self._is_chain else -1  # behind the others, or before them
            tokens = np.concatenate([tokens, np.zeros((len(tokens), padding), np.int64)][::order], 1)
            hidden = torch.cat([hidden, hidden[:, :1].expand(-1, padding, -1)][::order], 1)
            width += padding
        self._cache.reserve(self._lengths.max() + width)
        step = max(PADDED_WIDTH, PREFILL_TOKENS // len(tokens))
        for start in range(0, width, step):
            part = slice(start, start + step)
            if self._is_chain:
                self._append_first(tokens[:, part], hidden[:, part], counts, start)
            else:
                positions = (self._lengths + counts)[:, None] - width + np.arange(width)[part]
                self._append(tokens[:, part], hidden[:, part], positions)
        self._lengths, self._pending = self._lengths + counts, []

    def _append(self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray) -> None:
        """Reads accepted tokens [rows, columns]; those at positions below a sequence's length are padding."""
        tree = self._cache.tree
        is_padding = positions < self._lengths[:, None]
        positions = np.where(is_padding, 0, positions)
        numbers = np.stack([tokens, positions, np.where(is_padding, 0, tree + positions)])
        features, chances, indices = self._read(numbers, None, positions + 1, hidden, 0)
        self._root = features.clone(), chances.copy(), indices.copy()

    def _append_first(self, tokens: np.ndarray, hidden: torch.Tensor, counts: np.ndarray, start: int) -> None:
        """Reads accepted tokens [rows, columns] of an `EagleChain`, from number `start` of `counts` on."""
        temperature, lengths = np.array(self.temperatures[:1], np.float32), self._lengths + np.minimum(counts, start)
        features, *best = self._cache.read(tokens, counts - start, lengths, hidden, temperature)
        chances, indices = (x.numpy()[:, None].copy() for x in best)
        root = features.clone(), chances, indices
        if start:  # sequences that ended before keep theirs
            goes_on = (counts > start)[:, None, None]
            before, others = self._root, torch.from_numpy(goes_on)
            root = root[0].where(others, before[0]), *(np.where(goes_on, *pair) for pair in zip(root[1:], before[1:]))
        self._root = root


class EagleLayer(FewBitMatrices, EagleTree):
    """An `EagleTree` in plain operators, which can be captured.

    Subclasses have `heads`, the numbers of query, key and value heads, and `head_dim`.
    """

    heads: tuple[int, int, int]
    head_dim: int
    matrices = ("fuse", "attention_in", "attention_out", "mlp_in", "mlp_out")

    @property
    def _width(self) -> int:
        return 1 if self.beam is None and self.fuse.device.type == "cpu" else super()._width

    @property
    def _chains(self) -> bool:
        return self._width == 1 and self.fuse.device.type == "cpu" and interpreter() is not None

    @abstractmethod
    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the layer reads, [..., size], from embeddings of tokens and the features that predicted them.

        features: its own [..., hidden_size], or the target's with inner layers' [..., hidden_size * (1 + layers)].
        """

    @abstractmethod
    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [..., head_dim] of the rotary embedding at `positions` [...]."""

    @abstractmethod
    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [rows, heads, columns, head_dim] of x [rows, columns, size]; cos and sin:
        [..., columns, head_dim] of their positions."""

    @abstractmethod
    def outputs(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next features, [rows, columns, hidden_size], from attended [rows, heads, columns, head_dim]."""

    def _new_cache(self, rows: int, tree: int, branches: int) -> EagleCache | EagleChain:
        return EagleChain(self, rows, branches) if self._is_chain else EagleCache(self, rows, tree, branches)
