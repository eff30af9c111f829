"""SliceGPT (https://arxiv.org/abs/2401.15024): the residual stream is rotated into its principal components, and the
components of the least variance are cut off. RMSNorm commutes with rotations, so the rotation alone changes nothing
that the model computes, once the weights of the norms are folded into the linears behind them.

The paper has a rotation for each block, which needs a matrix on every residual connection. Here one rotation serves all
blocks, so the result is a model of the same class. An output embedding that is tied to the input embedding gets weights
of its own, because only one of the two is behind a norm."""

import torch

from hf_efficient.pruning.structured.basis import Basis, Moments


def basis(moments: Moments, size: int) -> Basis:
    """The `size` principal directions of the normalized inputs of all norms of the residual stream."""
    values, vectors = torch.linalg.eigh(moments.covariance.double())
    values, vectors = values.flip(0), vectors.flip(1)
    share = (values[:size].sum() / values.sum()).item()
    return Basis(vectors[:, :size].contiguous(), (len(values) / size * share) ** 0.5, True)
