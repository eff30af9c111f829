"""Chooses the neurons that a token needs: low-rank predictors by reduced-rank regression on the layer's own inputs, or
the gate itself, with a threshold that keeps a given share of the neurons or of their contributions.

A neuron contributes act(gate) * up times its column of the last linear; its importance is the norm of that. Chosen are
the neurons with

- rank 0: |act(gate x)| > limit. The gate is computed whole; rows of up and down are skipped. The limit of a neuron
  contains the mean of its |up| (CATS, https://arxiv.org/abs/2404.08763, has one threshold for all neurons). Layers
  without a gate compute the first linear whole; with ReLU and recall 1 only products that are 0 are skipped.
- rank r, no gate: score (project x) > limit: the predicted first product without its bias, in units of its usual error.
- rank r, gated: (act(score (project x))^2 + spread) * ((score_up (project x))^2 + limit) > 1: the squared predicted
  importance, where spread and limit are the mean squares of what low rank cannot predict.
"""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear.contextual_mlp import ACTIVATIONS


_RIDGE = 1e-4  # added to the covariance, in units of its mean diagonal
_SMALL = 1e-12  # avoids divisions by zero


class Predictor:
    """Predicts the importance of the neurons of one feed-forward layer.

    Args:
        x: float32 [rows, hidden], inputs of the layer to fit on.
        gate, up: float32 [neurons, hidden]; up is None without a gate, and `gate` then the first linear. With their
            biases [neurons] or None.
        down: float32 [hidden, neurons].
        rank: of the prediction; 0: the gate itself is computed.
    """

    def __init__(self, x, gate, gate_bias, up, up_bias, down, activation: str, rank: int):
        self.act, self.up = ACTIVATIONS[activation], up
        self.gate, self.gate_bias, self.up_bias = gate, gate_bias, up_bias
        self.norms = down.norm(dim=0)
        first = F.linear(x, gate, gate_bias)
        second = None if up is None else F.linear(x, up, up_bias)
        self.weight = self.norms if up is None else self.norms * second.abs().mean(0)
        self.project = None
        if rank:
            self._fit(x, first, second, rank)

    def _fit(self, x, first, second, rank: int) -> None:
        """The best maps of this rank from x to both products, with errors weighed by their effect on the output."""
        scales = [self.weight] if second is None else [self.weight, self.act(first).abs().mean(0) * self.norms]
        scale = torch.cat(scales).clamp_min(_SMALL)[:, None]
        weight = self.gate if second is None else torch.cat([self.gate, self.up])
        covariance = x.T @ x / len(x)
        covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean().clamp_min(_SMALL))
        root = torch.linalg.cholesky(covariance)
        left, size, right = torch.linalg.svd(weight * scale @ root, full_matrices=False)
        self.project = torch.linalg.solve_triangular(root.T, right[:rank].T, upper=True).T.contiguous()
        scores = (left[:, :rank] * size[:rank] / scale).split(len(self.gate))
        self.scores = scores
        guesses = [x @ self.project.T @ score.T for score in scores]
        if second is None:
            error = first - guesses[0]
            self.bias, self.deviation = error.mean(0), error.std(0) + _SMALL
        else:
            self.spread = (self.act(first) - self.act(guesses[0])).square().mean(0)
            self.spread_up = (second - guesses[1]).square().mean(0) + _SMALL

    def importance(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of the contribution of each neuron: [rows, neurons]."""
        values = self.act(F.linear(x, self.gate, self.gate_bias))
        if self.up is not None:
            values = values * F.linear(x, self.up, self.up_bias)
        return values.abs() * self.norms

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction that is compared with the threshold: [rows, neurons]."""
        if self.project is None:
            return self.act(F.linear(x, self.gate, self.gate_bias)).abs() * self.weight
        first, *second = (F.linear(x @ self.project.T, score) for score in self.scores)
        if not second:
            return (first + self.bias) / self.deviation
        return (self.act(first).square() + self.spread) * (second[0].square() + self.spread_up) * self.norms.square()

    def choice(self, threshold: float) -> dict[str, torch.Tensor]:
        """The tensors (see `CHOICE` in `layer`) that choose the neurons with a prediction above `threshold`."""
        if self.project is None:
            return {"limit": threshold / self.weight.clamp_min(_SMALL)}
        if self.up is None:
            limit = threshold * self.deviation - self.bias
            return {"project": self.project, "score": self.scores[0], "limit": limit}
        unit = self.norms / max(threshold, _SMALL) ** 0.5
        return {
            "project": self.project,
            "score": self.scores[0],
            "score_up": self.scores[1] * unit[:, None],
            "spread": self.spread,
            "limit": self.spread_up * unit.square(),
        }


def threshold_of_share(predicted: torch.Tensor, keep: float) -> float:
    """The smallest threshold that at most a share `keep` of `predicted` exceeds."""
    values = predicted.flatten().sort(descending=True).values
    return values[int(keep * len(values))].item()


def threshold_of_recall(predicted: torch.Tensor, importance: torch.Tensor, recall: float) -> float:
    """The largest threshold such that the neurons above it hold, on average over the rows, a share `recall` of the
    squared importance. Both tensors are [rows, neurons]."""
    squares = importance.square()
    shares = squares / squares.sum(1, keepdim=True).clamp_min(_SMALL)
    shares, predicted = shares / shares.sum(), predicted.flatten()
    order = predicted.argsort(descending=True)
    reached = shares.flatten()[order].double().cumsum(0)
    enough = (reached < recall * reached[-1] - 1e-9).sum().item()  # first position that reaches the recall
    value = predicted[order[enough]]
    return torch.nextafter(value, torch.full_like(value, -torch.inf)).item()
