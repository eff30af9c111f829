"""SliceGPT (https://arxiv.org/abs/2401.15024): the residual stream is rotated into its principal components, which
changes nothing that the model computes once the weights of the norms are folded into the linears behind them (RMSNorm
commutes with rotations), and the components with the least variance are cut off.

The paper rotates each block by itself, which needs a matrix on every residual connection. Here one rotation serves all
blocks: no connection needs anything and the result is a model of the same class. A head that is tied to the embedding
gets weights of its own, since only one of the two stands behind a norm."""

import torch

from hf_efficient.pruning.structured.basis import Basis, Moments


def basis(moments: Moments, size: int) -> Basis:
    """The `size` principal directions of what all norms of the residual stream are given, tokens normalized."""
    values, vectors = torch.linalg.eigh(moments.covariance.double())
    values, vectors = values.flip(0), vectors.flip(1)
    share = (values[:size].sum() / values.sum()).item()
    return Basis(vectors[:, :size].contiguous(), (len(values) / size * share) ** 0.5, True)
