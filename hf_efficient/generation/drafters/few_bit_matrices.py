"""Matrices of draft heads in few bits: where reading them takes the time, a draft takes half of it or less."""

import torch
from torch import nn
from torch.nn.functional import linear

from hf_efficient import methods
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.layers import compress_linear


FORMATS = {bits: WeightOnlyConfig(bits=bits, group_size=32, method="rtn") for bits in (4, 8)}
OUTPUT = "output head"
MOST_ROWS = 16  # of x: more are multiplied by the weights as they are, as arithmetic takes the time then


class FewBitMatrices:
    """Methods that come before those of `DraftHeads`.

    Attributes:
        bits: 8 or 4 for copies in so many bits of `matrices` and of the output head's rows, which few tokens at once
            are multiplied with; None for the weights as they are. They change what is drafted, never the output. May be
            set before any call.
        matrices: names of the parameters [out, in].
    """

    bits: int | None = None
    matrices: tuple[str, ...] = ()
    _copies: dict[str, nn.Module] = {}
    _copied_from = None

    def bind(self, model) -> None:
        """As `DraftHeads.bind`. Raises ValueError for other `bits` than 8, 4 or None."""
        if self.bits not in (None, *FORMATS):
            raise ValueError(f"bits={self.bits!r} of the draft heads: must be 8, 4 or None")
        super().bind(model)
        made_from = self.bits, self._weights
        if self._copied_from != made_from:
            self._copied_from, self._captures, self._copies = made_from, {}, {}
            if self.bits is not None:
                weights = {name: getattr(self, name) for name in self.matrices}
                weights[OUTPUT] = self._bound[1][0]
                self._copies = {
                    name: _rounded(weight, self.bits) for name, weight in weights.items() if weight is not None
                }

    def multiply(self, x: torch.Tensor, name: str, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] times one of `matrices`: [..., out]."""
        copy = self._copy(name, x)
        if copy is None:
            return linear(x, getattr(self, name), bias)
        return copy(x) if bias is None else copy(x) + bias

    def _copy(self, name: str, x: torch.Tensor) -> nn.Module | None:
        return self._copies.get(name) if x.shape[:-1].numel() <= MOST_ROWS else None

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        copy, bias = self._copy(OUTPUT, features), self._bound[1][1]
        if copy is None:
            return super().logits(features)
        return copy(features) if bias is None else copy(features) + bias.to(features.dtype)


@torch.no_grad()
def _rounded(weight: torch.Tensor, bits: int) -> nn.Module:
    """A layer without a bias that multiplies with `weight` [out, in] rounded to so many bits."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    config = FORMATS[bits]
    tensors = methods.quantize(weight.detach(), config.format(), config.method_name())
    layer = compress_linear(layer, config.format(), tensors).eval()
    layer.derive_layouts(weight.dtype)  # not at the first call, which captures
    return layer
