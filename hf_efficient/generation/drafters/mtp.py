"""Drafts from the multi-token-prediction (MTP) module that a model's own checkpoint holds."""

from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad

from hf_efficient.generation.drafters.eagle_tree import EagleTree
from hf_efficient.integrations import transformers_mtp


MAX_TOKENS = 5
FIRST_TOKENS = 256  # room of a new cache
_OF = WeakKeyDictionary()  # models -> what was read for `assistant_model="mtp"`


class MultiTokenPrediction(EagleTree):
    """The multi-token-prediction (MTP) module of `model`'s own checkpoint (DeepSeek-AI 2024, "DeepSeek-V3 Technical
    Report", section 2.2), such as that of DeepSeek-V3, GLM-4.5, Mellum, Qwen3-Next and Qwen3.5.
    `assistant_model="mtp"` creates this drafter and keeps it with the model.

    One decoder layer reads a token and the hidden state that predicted it, and computes the hidden state of the next
    token, which the model's output head reads. Deeper guesses continue from the module's own hidden states.

    Raises ValueError for a model whose checkpoint has no such module, or one of a kind that is not supported.
    """

    kind = "MTP"

    def __init__(self, model):
        module, target = transformers_mtp.load(model), self.describe(model)
        super().__init__(target, target["vocab_size"], MAX_TOKENS)
        self.module, self.window = module, transformers_mtp.window(module)
        if self.window is not None and self.window <= MAX_TOKENS:
            raise ValueError(
                f"the MTP module of {type(model).__name__} has sliding_window={self.window}: it must be larger than "
                f"the {MAX_TOKENS} tokens of a draft"
            )

    @property
    def fuse(self) -> torch.Tensor:
        """The weight that combines a token's embedding and hidden state."""
        return self.module.layers[0].eh_proj.weight

    def check(self, model) -> None:
        self._check_target(model)
        # without a cast: it would reach what is the model's own, and what transformers keeps in float32
        self.bind(model)

    def bind(self, model) -> None:
        device = self.fuse.device
        transformers_mtp.follow(self.module, model)
        if self.fuse.device != device:
            self._captures = {}
        self.draft_tokens = self.draft_tokens.to(self.fuse.device)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return transformers_mtp.logits(self.module, features)

    def _new_cache(self, rows: int, tree: int, branches: int) -> "MtpCache":
        return MtpCache(self, rows, tree, branches)


class MtpCache:
    """Keys and values of `rows` sequences, in whatever shapes the module's attention hands over: as `EagleCache`, and a
    cache to the module itself."""

    def __init__(self, heads: MultiTokenPrediction, rows: int, tree: int, branches: int):
        self.heads, self.tree, self.branches = heads, tree, branches
        self.columns, self.states = tree + FIRST_TOKENS, []
        self._row = torch.arange(rows, device=heads.fuse.device)[:, None]

    def reserve(self, tokens: int) -> None:
        if self.tree + tokens > self.columns:
            more = self.tree + (1 << int(tokens - 1).bit_length()) - self.columns
            self.columns += more
            self.states = [pad(states, (0, 0, 0, more)) for states in self.states]

    def copy(self, other: "MtpCache", rows: list[int]) -> None:
        self.reserve(other.columns - self.tree)
        more = self.columns - other.columns
        self.states = [pad(states[rows], (0, 0, 0, more)) for states in other.states]

    @torch.no_grad()
    def read(self, numbers, mask, features, temperature, last: bool):
        tokens, positions, self._at = numbers.unbind()
        if self.heads.window is not None:  # drafted nodes are nearer; the other columns lie in the order of positions
            behind = positions[..., None] + self.tree - torch.arange(self.columns, device=mask.device)
            drafted = torch.arange(self.columns, device=mask.device) < self.tree
            mask = mask.masked_fill(((behind >= self.heads.window) & ~drafted)[:, None], -torch.inf)
        following = transformers_mtp.step(self.heads.module, tokens, positions + 1, features, mask.to(features), self)
        following = following[:, -1:] if last else following
        best = (self.heads.logits(following).float() / temperature).softmax(-1).topk(self.branches, dim=-1)
        return following, *best

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """What the module's attention calls: keeps `keys` and `values` [rows, heads, width, size] of the tokens that
        are being read, and returns all."""
        if not self.states:
            self.states = [x.new_zeros(*x.shape[:2], self.columns, x.shape[-1]) for x in (keys, values)]
        for states, new in zip(self.states, (keys, values)):
            states.transpose(1, 2)[self._row, self._at] = new.transpose(1, 2)
        return tuple(self.states)


def of(model) -> MultiTokenPrediction:
    """The drafter that `assistant_model="mtp"` means for `model`. Raises ValueError as `MultiTokenPrediction`."""
    if model not in _OF:
        _OF[model] = MultiTokenPrediction(model)
    return _OF[model]
