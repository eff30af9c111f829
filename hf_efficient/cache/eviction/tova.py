"""TOVA: the attention that the last query pays, the same tokens for all heads."""

import torch

from hf_efficient.cache.eviction.base import Scorer, View


class TOVA(Scorer):
    """Paper: Oren et al., Transformers are Multi-State RNNs (2401.06104)."""

    window = 1

    def score(self, view: View) -> torch.Tensor:
        return view.attention()[..., -1, :].mean((1, 2))[:, None].expand(view.present.shape)
