"""Drafts from an EAGLE head: one decoder layer that continues the target's own features."""

import torch
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from hf_efficient.generation.drafters.base import Proposal
from hf_efficient.generation.drafters.draft_heads import DraftHeads, best_first


BRANCHES = 8  # children of a node that are considered
REACHED = 0.2  # a depth is drafted only where it is as probable as that, in some row, that the target gets there
PREFILL = 512  # tokens of a prompt read at a time


class EagleHead(DraftHeads):
    """Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". A feature is what the target's
    output head reads. From the feature that predicted a token, and the token, one decoder layer makes the next feature; the
    target's own head says what that predicts; and so on from its own features. The layer keeps keys and values of every
    token the target has accepted.

    Guesses form the dynamic tree of EAGLE-2 (Li et al. 2024): at each depth the `beam` most probable nodes are continued,
    and of all that were considered the `nodes` most probable ones are proposed.

    Args: `num_heads`, `num_key_value_heads`, `head_dim` and `intermediate_size` are those of the layer; the others see
    `DraftHeads`.

    Attributes:
        beam: nodes continued at each depth, >= 1; with `beam = nodes = 1` a step a chain. May be set any time.
    """

    kind = "eagle"
    shape_fields = ("num_heads", "num_key_value_heads", "head_dim", "intermediate_size")

    def __init__(
        self,
        target: dict,
        draft_tokens: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        intermediate_size: int,
        max_tokens: int = 5,
    ):
        shape = (num_heads, num_key_value_heads, head_dim, intermediate_size)
        super().__init__(target, draft_tokens, max_tokens, **dict(zip(self.shape_fields, shape)))
        self.beam = 6
        size, self.heads = self.target["hidden_size"], (num_heads, num_key_value_heads, num_key_value_heads)
        self.head_dim = head_dim
        for name, out, into in (
            ("fuse", size, 2 * size),
            ("attention_in", sum(self.heads) * head_dim, size),
            ("attention_out", size, num_heads * head_dim),
            ("mlp_in", 2 * intermediate_size, size),
            ("mlp_out", size, intermediate_size),
        ):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(out, into) * into**-0.5))
        for name in ("embedding_norm", "feature_norm", "attention_norm", "mlp_norm", "output_norm"):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(size)))

    @classmethod
    def for_model(cls, model, draft_tokens: int) -> "EagleHead":
        config = model.config.get_text_config(decoder=True)
        heads, size = config.num_attention_heads, config.hidden_size
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or size // heads
        intermediate_size = getattr(config, "intermediate_size", None) or 4 * size
        return cls(cls.describe(model), draft_tokens, heads, key_value_heads, head_dim, intermediate_size)

    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the layer reads, [..., hidden_size], from tokens' embeddings and the features that predicted them."""
        return linear(self._read_by_fuse(embeddings, features), self.fuse)

    def _read_by_fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([_norm(embeddings, self.embedding_norm), _norm(features, self.feature_norm)], -1)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [rows, heads, columns, head_dim] of x [rows, columns, hidden_size] at `positions` [rows,
        columns]."""
        mixed = linear(_norm(x, self.attention_norm), self.attention_in)
        mixed = mixed.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        query, key, value = mixed.split(self.heads, dim=1)
        half = self.head_dim // 2
        frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = positions[:, None, :, None].float() * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def rotate(states):
            left, right = states[..., :half], states[..., half:]
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

        return rotate(query), rotate(key), value

    def outputs(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next features, [rows, columns, hidden_size], from attended [rows, heads, columns, head_dim]."""
        x = x + linear(attended.transpose(1, 2).flatten(2), self.attention_out)
        gate, up = linear(_norm(x, self.mlp_norm), self.mlp_in).chunk(2, -1)
        x = x + linear(silu(gate) * up, self.mlp_out)
        return _norm(x, self.output_norm)

    @torch.no_grad()
    def fit(self, examples) -> None:
        """Least squares: the next feature, each of its numbers scaled to a mean square of 1, as a linear function of what
        `fuse` reads. The rest of the layer starts out silent. For heads whose norms have not been trained."""
        size = len(self.output_norm)
        products = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
        targets, squares, count = torch.zeros(2 * size, size, dtype=torch.float64), torch.zeros(size), 0
        for tokens, hidden in examples:
            hidden = hidden.to(self.fuse)
            embeddings = self.embed(tokens[1:-1].to(self.fuse.device)).to(self.fuse.dtype)
            read, following = self._read_by_fuse(embeddings, hidden[:-1]), hidden[1:]
            products += (read.T @ read).cpu()
            targets += (read.T @ following).cpu()
            squares += following.square().sum(0).cpu()
            count += len(following)
        scale = (squares / max(count, 1)).sqrt().clamp(min=1e-6)
        read_scale = (products.diagonal() / max(count, 1)).sqrt().clamp(min=1e-6)
        products.diagonal().mul_(1 + 1e-4)
        solution = torch.linalg.solve(products, targets / scale)  # [what is read, the next feature]
        self.output_norm.copy_(scale)
        # what is read is scaled to a mean square of 1 too: steps of one size then suit all weights
        self.embedding_norm.copy_(1 / read_scale[:size])
        self.feature_norm.copy_(1 / read_scale[size:])
        self.fuse.copy_((solution * read_scale[:, None]).T)
        self.attention_out.zero_()
        self.mlp_out.zero_()

    def unroll(self, tokens: torch.Tensor, hidden: torch.Tensor, depth: int):
        """Guesses at every position of known text, from features that are guesses themselves ("training-time test" of Li et
        al. 2025, "EAGLE-3"): the d-th yielded tensor (from 0) holds at position i what was guessed for hidden[:, i] after
        d + 1 guesses in a row, the first of them from the target's own features. Its first d + 1 positions are meaningless.

        Args: tokens int64 [rows, length + 1]; hidden [rows, length, hidden_size], hidden[:, i] predicted tokens[:, i + 1].
        Yields `depth` tensors [rows, length, hidden_size].
        """
        rows, length = hidden.shape[:2]
        embeddings = self.embed(tokens[:, 1:])
        positions = torch.arange(length, device=hidden.device).expand(rows, -1)
        repeat = self.heads[0] // self.heads[1]
        distance = positions[0][:, None] - positions[0]
        keys, values, features = [], [], hidden
        for step in range(depth):
            x = self.inputs(embeddings, features)
            query, key, value = self.project(x, positions)
            keys.append(key.repeat_interleave(repeat, 1))
            values.append(value.repeat_interleave(repeat, 1))
            # position i sees what the target's features gave up to i - step, then one guess from each step since
            scores = (query @ keys[0].transpose(-1, -2)).float().masked_fill(distance < step, float("-inf"))
            own = [
                (query * _later(keys[past], step - past)).sum(-1, keepdim=True).float() for past in range(1, step + 1)
            ]
            weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1).to(query.dtype)
            attended = weights[..., :length] @ values[0]
            for past in range(1, step + 1):
                attended = attended + weights[..., length + past - 1, None] * _later(values[past], step - past)
            features = _later(self.outputs(x, attended), 1)
            yield features

    def begin(self, sequences, hidden=None) -> None:
        rows, columns = hidden.shape[:2]
        self._sequences = sequences
        self._lengths = [0] * rows  # tokens the cache holds
        self._features = hidden.new_zeros(rows, hidden.shape[-1], device=self.fuse.device, dtype=self.fuse.dtype)
        shape = (rows, self.heads[1], 0, self.head_dim)
        self._keys, self._values = self._features.new_empty(shape), self._features.new_empty(shape)
        # what the layer has not read yet: tokens, the features that predicted them, and how many are real (the first ones)
        padding = [0] * rows
        if sequences.prompt_mask is not None:
            mask = sequences.prompt_mask[sequences.live]
            padding = (columns - mask[:, -columns:].sum(1)).tolist()
        tokens = sequences.last(columns)
        place = torch.arange(columns, device=hidden.device) + torch.tensor(padding, device=hidden.device)[:, None]
        place = place.clamp(max=columns - 1)
        self._pending = [
            (
                tokens.gather(1, place.to(tokens.device)),
                hidden.gather(1, place[..., None].expand_as(hidden)),
                [columns - n for n in padding],
            )
        ]

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        counts = [len(new) for new in tokens]
        padded = [new + [0] * (max(counts) - len(new)) for new in tokens]
        if max(counts):
            self._pending.append((torch.tensor(padded), hidden, counts))

    def select(self, rows: list[int]) -> None:
        self._lengths = [self._lengths[row] for row in rows]
        self._features, self._keys, self._values = (
            values[rows] for values in (self._features, self._keys, self._values)
        )
        self._pending = [
            (tokens[rows], hidden[rows], [counts[row] for row in rows]) for tokens, hidden, counts in self._pending
        ]

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        depth, nodes = min(self.max_tokens, max(limits)), min(nodes, self.nodes)
        if depth == 0:
            return None
        self._catch_up()
        rows, device = len(self._lengths), self.fuse.device
        beam, branches = min(self.beam, nodes), min(BRANCHES, nodes, len(self.draft_tokens))
        lengths = torch.tensor(self._lengths, device=device)
        past = max(self._lengths)  # the tree stands in the cache after the longest row
        known = (torch.arange(past, device=device) < lengths[:, None])[:, None]
        above = torch.full((rows, 1), -1, device=device)  # candidates whose children are chosen now: their numbers,
        likely = torch.ones(rows, 1, device=device)  # the probability of the paths to them,
        features = self._features[:, None]  # and what predicts their children
        seen = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)  # [rows, beam, columns of the tree]
        tokens, confidence, parents, depths = [], [], [], []
        for level in range(depth):
            scores = self.logits(features).float() / self.temperatures[level]
            chances, places = scores.softmax(-1).topk(branches, dim=-1)  # [rows, beam, branches]
            confidence.append((chances * likely[..., None]).flatten(1))
            tokens.append(self.draft_tokens[places].flatten(1))
            parents.append(above[..., None].expand_as(places).flatten(1))
            depths += [level + 1] * tokens[-1].shape[1]
            if level + 1 == depth:
                break
            first = sum(part.shape[1] for part in confidence[:-1])
            likely, best = confidence[-1].topk(min(beam, confidence[-1].shape[1]), dim=-1)
            if likely.sum(1).max() < REACHED:
                break
            above, of = first + best, best // branches
            index = of[..., None]
            features = features.gather(1, index.expand(-1, -1, features.shape[-1]))
            own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(rows, -1, -1)
            seen = torch.cat([seen.gather(1, index.expand(-1, -1, seen.shape[-1])), own], -1)
            positions = (lengths + level)[:, None].expand_as(best)
            column = past + seen.shape[-1] - best.shape[1]
            visible = torch.cat([known.expand(-1, best.shape[1], -1), seen], -1)
            features = self._layer(tokens[-1].gather(1, best), features, positions, column, visible)
        candidates = (torch.cat(tokens, 1), torch.cat(confidence, 1), torch.cat(parents, 1), torch.tensor(depths))
        candidates = (values.to(self._sequences.device) for values in candidates)
        return best_first(*candidates, limits, nodes)

    def _layer(self, tokens, features, positions, column: int, visible: torch.Tensor) -> torch.Tensor:
        """Reads tokens [rows, columns] and the features that predicted them, and keeps keys and values in the cache from
        `column` on. visible bool [rows, columns, cache columns up to the new ones']. Returns the next features."""
        x = self.inputs(self.embed(tokens), features)
        query, key, value = self.project(x, positions)
        self._write(key, value, torch.full((len(tokens),), column, device=x.device), column + tokens.shape[1])
        return self._attend(x, query, visible)

    def _attend(self, x, query, visible: torch.Tensor) -> torch.Tensor:
        keys, values = (states[:, :, : visible.shape[-1]] for states in (self._keys, self._values))
        attended = scaled_dot_product_attention(query, keys, values, visible[:, None], enable_gqa=True)
        return self.outputs(x, attended)

    def _catch_up(self) -> None:
        """Reads what is pending; `_features` then predict the token after each row's last one."""
        for tokens, hidden, counts in self._pending:
            for start in range(0, max(counts), PREFILL):
                part = [min(max(count - start, 0), PREFILL) for count in counts]
                width = max(part)
                columns = slice(start, start + width)
                self._read(tokens[:, columns].to(self.fuse.device), hidden[:, columns].to(self.fuse), part)
        self._pending = []

    def _read(self, tokens: torch.Tensor, hidden: torch.Tensor, counts: list[int]) -> None:
        """Appends the first `counts[row]` tokens of each row to the cache."""
        device, width = tokens.device, tokens.shape[1]
        lengths, new = (torch.tensor(values, device=device) for values in (self._lengths, counts))
        positions = lengths[:, None] + torch.arange(width, device=device)
        x = self.inputs(self.embed(tokens), hidden)
        query, key, value = self.project(x, positions)
        self._write(key, value, lengths, max(self._lengths) + width)
        visible = torch.arange(max(self._lengths) + width, device=device) <= positions[..., None]
        features = self._attend(x, query, visible)
        latest = features[torch.arange(len(tokens), device=device), (new - 1).clamp(min=0)]
        self._features = torch.where(new[:, None] > 0, latest, self._features)
        self._lengths = [length + count for length, count in zip(self._lengths, counts)]

    def _write(self, key: torch.Tensor, value: torch.Tensor, first: torch.Tensor, needed: int) -> None:
        """Keeps key and value [rows, heads, columns, head_dim] in columns `first[row]`, ... of the cache, below `needed`."""
        width = key.shape[2]
        if needed > self._keys.shape[2]:
            room = max(needed - self._keys.shape[2], 256)
            self._keys, self._values = (pad(states, (0, 0, 0, room)) for states in (self._keys, self._values))
        row = torch.arange(len(key), device=key.device)[:, None]
        column = first[:, None] + torch.arange(width, device=key.device)
        self._keys.transpose(1, 2)[row, column] = key.transpose(1, 2)
        self._values.transpose(1, 2)[row, column] = value.transpose(1, 2)


def _later(states: torch.Tensor, steps: int) -> torch.Tensor:
    """states [..., columns, size], moved `steps` columns to the right; zeros come in."""
    return pad(states[..., : states.shape[-2] - steps, :], (0, 0, steps, 0))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.to(weight.dtype), weight.shape, weight, 1e-6)
