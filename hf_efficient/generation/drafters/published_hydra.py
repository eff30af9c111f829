"""Hydra heads as their authors publish them: each guesses from the last state and the guesses before its own."""

import numpy as np
import torch
from torch.nn.functional import linear, silu

from hf_efficient.generation.drafters.draft_heads import DraftHeads, unscaled_embeddings
from hf_efficient.generation.drafters.last_hidden import LastHiddenMixin
from hf_efficient.generation.drafters.published_config import check_integers
from hf_efficient.generation.drafters.published_tensors import PublishedTensors
from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.token_tree import best_first


BRANCHES = 8  # children of a node that are considered
ALLOWED = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}


class PublishedHydra(LastHiddenMixin, DraftHeads):
    """Published Hydra heads (Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding"), of
    the kind "mlp": `hydra_num_heads` in `config.json`, `hydra_lm_head.safetensors`.

    Head i reads x = [h, e_0, …, e_i]: the state that predicted the last token, the last token's embedding and those of
    the i guesses before. Its first block computes R x + r + silu(A x + b), further ones x + silu(A x + b); its output
    head guesses the next token. At each depth the `beam` most probable nodes are continued.
    """

    kind = "published Hydra"

    def __init__(self, name: str, heads: list[dict[str, torch.Tensor]]):
        vocab_size, size = heads[0]["head"].shape
        super().__init__({"name": name, "hidden_size": size, "vocab_size": vocab_size}, vocab_size, len(heads))
        self.beam = 6
        self.parts = torch.nn.ModuleList(
            torch.nn.ParameterDict({key: torch.nn.Parameter(value) for key, value in head.items()}) for head in heads
        )
        self.requires_grad_(False).eval()

    @classmethod
    def of(cls, config: dict, tensors: PublishedTensors, name: str) -> "PublishedHydra":
        """Raises ValueError for a config or tensors that are not read."""
        for key, allowed in ALLOWED.items():
            if config.get(key, allowed if key == "hidden_state_offset" else None) != allowed:
                raise ValueError(f"{name}: {key}={config.get(key)!r}; {allowed!r} is allowed")
        heads, blocks = config["hydra_num_heads"], config.get("hydra_num_layers")
        check_integers(name, {"hydra_num_heads": heads, "hydra_num_layers": blocks})
        vocab_size, size = tensors.shape("hydra_lm_head.0.weight")
        parts = []
        for head in range(heads):
            reads, prefix = (head + 2) * size, f"hydra_mlp.{head}."
            part = {
                "head": tensors.take(f"hydra_lm_head.{head}.weight", vocab_size, size),
                "head_bias": tensors.take(f"hydra_lm_head.{head}.bias", vocab_size),
                "residual": tensors.take(f"{prefix}0.res_connection.weight", size, reads),
                "residual_bias": tensors.take(f"{prefix}0.res_connection.bias", size),
            }
            for block in range(blocks):
                into = size if block else reads
                part[f"weight_{block}"] = tensors.take(f"{prefix}{block}.linear.weight", size, into)
                part[f"bias_{block}"] = tensors.take(f"{prefix}{block}.linear.bias", size)
            parts.append(part)
        tensors.finish()
        return cls(config.get("base_model_name_or_path") or name, parts)

    def scores(self, head: int, x: torch.Tensor) -> torch.Tensor:
        """The logits [..., vocabulary] of a head (from 0) that reads x [..., (head + 2) * hidden_size]."""
        part, block = self.parts[head], 0
        x = linear(x, part["residual"], part["residual_bias"]) + silu(linear(x, part["weight_0"], part["bias_0"]))
        while f"weight_{(block := block + 1)}" in part:
            x = x + silu(linear(x, part[f"weight_{block}"], part[f"bias_{block}"]))
        return linear(x, part["head"], part["head_bias"])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return unscaled_embeddings(tokens, self._bound[0])

    def _output_rows(self, output, model) -> tuple:
        return None, None  # their own

    def begin(self, sequences, hidden=None) -> None:
        self._sequences, self._hidden = sequences, hidden[:, -1]

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        depth = min(self.max_tokens, max(limits))
        if depth == 0:
            return None
        weight = self.parts[0]["head"]
        last = self.embed(self._sequences.last(1).to(weight.device)).to(weight)
        x = torch.cat([self._hidden[:, None].to(weight), last], -1)
        row, likely = np.arange(len(x))[:, None], np.ones((len(x), 1), np.float32)
        above, tokens, confidence, parents, depths = np.full((len(x), 1), -1), [], [], [], []
        for level in range(depth):
            scores = self.scores(level, x).float() / self.temperatures[level]
            best = scores.softmax(-1).topk(min(BRANCHES, scores.shape[-1]), dim=-1)
            chances, indices = (part.cpu().numpy() for part in best)
            branches, before = chances.shape[-1], sum(part.shape[1] for part in tokens)
            tokens.append(indices.reshape(len(x), -1))
            confidence.append((chances * likely[..., None]).reshape(len(x), -1))
            parents.append(above.repeat(branches, 1))
            depths += [level + 1] * tokens[-1].shape[1]
            chosen = (-confidence[-1]).argsort(1, kind="stable")[:, : self.beam]
            likely, above = confidence[-1][row, chosen], chosen + before
            of = torch.from_numpy(chosen // branches).to(x.device)[..., None].expand(-1, -1, x.shape[-1])
            guesses = torch.from_numpy(tokens[-1][row, chosen]).to(x.device)
            x = torch.cat([x.gather(1, of), self.embed(guesses).to(x)], -1)
        candidates = (np.concatenate(parts, 1) for parts in (tokens, confidence, parents))
        return best_first(*candidates, np.array(depths), limits, min(nodes, self.nodes), self._sequences.device)
