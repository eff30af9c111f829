"""Drafts from an EAGLE head: one decoder layer that continues the target's own features."""

import torch
from torch.nn.functional import pad, silu

from hf_efficient.generation.drafters.eagle_tree import EagleLayer


TRAINED_DEPTH = 3  # guesses in a row; deeper ones are only measured
SHALLOW_SHARE = 0.5  # of the training steps, the first ones: they train one guess only and take half the time


class EagleHead(EagleLayer):
    """An EAGLE head (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty").

    A feature is the input of the target's output head. One decoder layer reads a token and the feature that predicted
    it, and computes the next feature; the target's output head turns that into probabilities of the next token. The
    layer then continues from its own features. For accepted tokens it reads the target's features, with the outputs of
    two of the target's inner layers (as in EAGLE-3), and caches its keys and values.

    Args:
        num_heads, num_key_value_heads, head_dim, intermediate_size: of the decoder layer.
        target, draft_tokens, max_tokens: as in `DraftHeads`.
    """

    kind = "eagle"
    matrices = (*EagleLayer.matrices, "fuse_target")
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
        size, self.heads = self.target["hidden_size"], (num_heads, num_key_value_heads, num_key_value_heads)
        self.head_dim = head_dim
        self.reads_layers = self.layers_read(self.target["num_hidden_layers"])
        parts = 1 + len(self.reads_layers)
        for name, out, into in (
            ("fuse", size, 2 * size),
            ("fuse_target", size, (1 + parts) * size),
            ("attention_in", sum(self.heads) * head_dim, size),
            ("attention_out", size, num_heads * head_dim),
            ("mlp_in", 2 * intermediate_size, size),
            ("mlp_out", size, intermediate_size),
        ):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(out, into) * into**-0.5))
        for name in ("embedding_norm", "feature_norm", "attention_norm", "mlp_norm", "output_norm"):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(size)))
        self.target_norm = torch.nn.Parameter(torch.ones(parts * size))

    @classmethod
    def for_model(cls, model, draft_tokens: int) -> "EagleHead":
        """As `DraftHeads.for_model`: the sizes of the layer are those of the model's own layers."""
        config = model.config.get_text_config(decoder=True)
        heads, size = config.num_attention_heads, config.hidden_size
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or size // heads
        intermediate_size = getattr(config, "intermediate_size", None) or 4 * size
        return cls(cls.describe(model), draft_tokens, heads, key_value_heads, head_dim, intermediate_size)

    def trained_depth(self, progress: float) -> int:
        return 1 if progress < SHALLOW_SHARE else min(self.max_tokens, TRAINED_DEPTH)

    def inputs(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the layer reads, [..., hidden_size], from embeddings of tokens and the features that predicted them.

        features: its own [..., hidden_size], or the target's with inner layers' [..., hidden_size * (1 + layers)].
        """
        is_own = features.shape[-1] == embeddings.shape[-1]
        norm, fuse = (self.feature_norm, "fuse") if is_own else (self.target_norm, "fuse_target")
        return self.multiply(self._read_by_fuse(embeddings, features, norm), fuse)

    def _read_by_fuse(self, embeddings: torch.Tensor, features: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        size = embeddings.shape[-1]
        parts = [_norm(*part) for part in zip(features.split(size, -1), norm.split(size))]
        return torch.cat([_norm(embeddings, self.embedding_norm), *parts], -1)

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [..., head_dim] of the rotary embedding at `positions` [...]."""
        half = self.head_dim // 2
        frequency = 10000.0 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        angle = (positions[..., None] * frequency).repeat(*[1] * positions.dim(), 2)
        return angle.cos().to(self.fuse.dtype), angle.sin().to(self.fuse.dtype)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [rows, heads, columns, head_dim] of x [rows, columns, hidden_size]; cos and sin:
        [..., columns, head_dim] of their positions."""
        mixed = self.multiply(_norm(x, self.attention_norm), "attention_in")
        mixed = mixed.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        query, key, value = mixed.split(self.heads, dim=1)
        cos, sin, half = cos.unsqueeze(-3), sin.unsqueeze(-3), self.head_dim // 2

        def turn(states):
            return states * cos + torch.cat([-states[..., half:], states[..., :half]], -1) * sin

        return [turn(query), turn(key), value]

    def outputs(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The next features, [rows, columns, hidden_size], from attended [rows, heads, columns, head_dim]."""
        x = x + self.multiply(attended.transpose(1, 2).flatten(2), "attention_out")
        gate, up = self.multiply(_norm(x, self.mlp_norm), "mlp_in").chunk(2, -1)
        x = x + self.multiply(silu(gate) * up, "mlp_out")
        return _norm(x, self.output_norm)

    @torch.no_grad()
    def fit(self, examples) -> None:
        """Least squares: the next feature as a linear function of what `fuse` reads, both scaled to a mean square of 1;
        attention and MLP start at 0. For heads whose norms have not been trained."""
        size, whole = self.fuse_target.shape
        products = torch.zeros(whole, whole, dtype=torch.float64)
        targets, squares, count = products.new_zeros(whole, size), torch.zeros(size, dtype=torch.float32), 0
        for tokens, hidden in examples:
            hidden = hidden.to(self.fuse)
            embeddings = self.embed(tokens[1:-1].to(self.fuse.device)).to(self.fuse.dtype)
            read, following = self._read_by_fuse(embeddings, hidden[:-1], self.target_norm), hidden[1:, :size]
            products += (read.T @ read).cpu()
            targets += (read.T @ following).cpu()
            squares += following.square().sum(0).cpu()
            count += len(following)
        scale = (squares / max(count, 1)).sqrt().clamp(min=1e-6)
        read_scale = (products.diagonal() / max(count, 1)).sqrt().clamp(min=1e-6)
        products.diagonal().mul_(1 + 1e-4)
        self.output_norm.copy_(scale)
        # what is read is scaled to a mean square of 1, too, so that one learning rate suits all weights
        self.embedding_norm.copy_(1 / read_scale[:size])
        self.target_norm.copy_(1 / read_scale[size:])
        self.feature_norm.copy_(self.target_norm[:size])
        for fuse in (self.fuse, self.fuse_target):
            read = fuse.shape[1]  # it reads the first so many numbers
            solution = torch.linalg.solve(products[:read, :read], targets[:read] / scale)  # [read, the next feature]
            fuse.copy_((solution * read_scale[:read, None]).T)
        self.attention_out.zero_()
        self.mlp_out.zero_()

    def unroll(self, tokens: torch.Tensor, hidden: torch.Tensor, depth: int):
        """Guesses at every position of known text, from features that are guesses themselves ("training-time test" of
        Li et al. 2025, "EAGLE-3").

        Args:
            tokens: int64 [rows, length + 1].
            hidden: [rows, length, hidden_size * (1 + layers)]; hidden[:, i] predicted tokens[:, i + 1].
        Yields `depth` tensors [rows, length, hidden_size]. Position i of the d-th (from 0) is the guess for hidden[:,
        i] after d + 1 guesses in a row, the first from the target's own features. Skip its first d + 1 positions.
        """
        length = hidden.shape[1]
        embeddings = self.embed(tokens[:, 1:])
        positions = torch.arange(length, device=hidden.device)
        turns, repeat = self.turns(positions), self.heads[0] // self.heads[1]
        distance = positions[:, None] - positions
        keys, values, features = [], [], hidden
        for step in range(depth):
            x = self.inputs(embeddings, features)
            query, key, value = self.project(x, *turns)
            keys.append(key.repeat_interleave(repeat, 1))
            values.append(value.repeat_interleave(repeat, 1))
            # position i attends to the target's features up to i - step, then to one guess from each step since
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


def _later(states: torch.Tensor, steps: int) -> torch.Tensor:
    """states [..., columns, size] moved `steps` columns to the right, with zeros before them."""
    return pad(states[..., : states.shape[-2] - steps, :], (0, 0, steps, 0))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(weight.dtype)
