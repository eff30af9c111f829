"""Medusa heads as FasterDecoding publishes them: each has residual blocks and an output head of its own."""

import functools

import torch
from torch.nn.functional import linear, silu

from hf_efficient.generation.drafters.medusa import MedusaHeads
from hf_efficient.generation.drafters.published_config import check_integers
from hf_efficient.generation.drafters.published_tensors import PublishedTensors
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import product_trees
from hf_efficient.kernels.replay.function import CapturedFunction


BRANCHES = 8  # guesses of each head that are considered


class PublishedMedusa(MedusaHeads):
    """Published Medusa heads (Cai et al. 2024, "Medusa"): `medusa_num_heads` in `config.json`, tensors `i.j.linear.*`
    of head i's block j and `i.j.weight` of its output head, in `medusa_lm_head.safetensors` or, as `medusa_head.i.…`,
    among those of the target.

    Head i reads h, the hidden state that predicted the last token. Its blocks compute h + silu(A h + b), one after the
    other; its output head guesses the token i + 1 positions behind the last one. The most probable paths are proposed.
    """

    kind = "published Medusa"

    def __init__(self, name: str, weight: torch.Tensor, bias: torch.Tensor, vocabulary: torch.Tensor):
        heads, vocab_size, size = vocabulary.shape
        with torch.device("meta"):
            super().__init__({"name": name, "hidden_size": size, "vocab_size": vocab_size}, vocab_size, heads)
        self.draft_tokens = torch.arange(vocab_size)
        self.weight, self.bias, self.vocabulary = (torch.nn.Parameter(x) for x in (weight, bias, vocabulary))
        self.requires_grad_(False).eval()

    @classmethod
    def of(cls, config: dict, tensors: PublishedTensors, name: str) -> "PublishedMedusa":
        """Raises ValueError for tensors that are not those of `config`."""
        blocks, said = config.get("medusa_num_layers", 1), config["medusa_num_heads"]
        check_integers(name, {"medusa_num_layers": blocks, "medusa_num_heads": said})
        is_alone = f"0.{blocks}.weight" in tensors
        if not is_alone:  # beside the target's tensors
            tensors = PublishedTensors(tensors.files, "medusa_head.")
        vocab_size, size = tensors.shape(f"0.{blocks}.weight")
        heads = sum(f"{head}.{blocks}.weight" in tensors for head in range(64))
        if heads < said:  # more there may be: the published config.json says 2 where there are 5
            raise ValueError(f"{name}: medusa_num_heads={said}, and there are tensors of {heads} heads")
        parts = [
            [
                (
                    tensors.take(f"{head}.{block}.linear.weight", size, size),
                    tensors.take(f"{head}.{block}.linear.bias", size),
                )
                for block in range(blocks)
            ]
            for head in range(heads)
        ]
        weight, bias = (torch.stack([torch.stack([block[i] for block in head]) for head in parts]) for i in (0, 1))
        vocabulary = torch.stack([tensors.take(f"{head}.{blocks}.weight", vocab_size, size) for head in range(heads)])
        tensors.finish()
        return cls(config.get("base_model_name_or_path") or name, weight, bias, vocabulary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What each head's output head reads, [rows, heads, hidden_size], from hidden [rows, hidden_size]."""
        x = hidden.expand(len(self.weight), *hidden.shape)
        for block in range(self.weight.shape[1]):
            inner = torch.baddbmm(self.bias[:, block, None], x, self.weight[:, block].transpose(1, 2))
            x = x + silu(inner)
        return x.transpose(0, 1)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        guesses = self(hidden).unbind(1)
        return torch.stack([linear(guess, head) for guess, head in zip(guesses, self.vocabulary)], 1)

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        if not any(limits):
            return None
        branches, limits = min(BRANCHES, len(self.draft_tokens)), [min(limit, self.max_tokens) for limit in limits]
        if branches not in self._captures:
            self._captures[branches] = CapturedFunction(functools.partial(self._guess, branches))
        likely, tokens = (
            x.cpu().numpy() for x in self._captures[branches](self._hidden.to(self.bias), self._temperatures)
        )
        return product_trees(tokens, likely, limits, min(nodes, self.nodes), self._device)

    def _output_rows(self, output, model) -> tuple:
        return None, None  # their own
