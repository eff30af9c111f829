"""Attention relations across widths (MiniLM v2, https://arxiv.org/abs/2012.15828): how like each other the queries of
two tokens are, their keys and their values, as a distribution over the tokens so far."""

import math

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class LastAttention(TorchFunctionMode):
    """Inside, the queries, keys and values [B, heads, T, D] of the last layer's `scaled_dot_product_attention` are kept
    in `last`."""

    last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.last = (*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :]))[:3]
        return function(*args, **kwargs)


def relation_loss(student, teacher, counted: torch.Tensor) -> torch.Tensor:
    """The mean KL divergence of the student's relations from the teacher's, over queries, keys and values, relation
    heads and tokens.

    Args:
        student, teacher: three tensors [B, heads, T, D] each, of any numbers of heads and dims. Their channels are
            dealt out anew to relation heads: the most, up to the teacher's number of heads, that divide both widths.
        counted: bool [B, T], the tokens whose relations to all tokens so far count. Padding is on the right.
    """
    total = 0.0
    for mine, other in zip(student, teacher):
        widths = [x.shape[1] * x.shape[3] for x in (mine, other)]
        common = math.gcd(*widths)
        heads = max(n for n in range(1, other.shape[1] + 1) if common % n == 0)
        log_q, log_p = (_relations(x, heads) for x in (mine, other.to(mine.device)))
        each = (log_p.exp() * (log_p - log_q).masked_fill(log_p == float("-inf"), 0)).sum(-1)  # [B, heads, T]
        total = total + each.transpose(1, 2)[counted].mean()
    return total / len(student)


def _relations(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, h, T, D] -> the logarithms of the relations, float32 [B, heads, T, T]; -inf for tokens that come later."""
    x = x.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2).float()
    scores = x @ x.transpose(-1, -2) / x.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return scores.masked_fill(later, float("-inf")).log_softmax(-1)
