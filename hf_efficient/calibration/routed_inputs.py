"""Statistics of the inputs of fused experts, one expert at a time: the routed rows are kept, not what follows from
them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hf_efficient.experts import expert_weight_names
from hf_efficient.integrations.transformers_compat import expert_activation
from hf_efficient.observers.linear_inputs import LinearInputs


class RoutedRows:
    """The hidden states that fused experts `module` were called with, and the experts that each row was routed to.

    Args:
        keep: called with (number of the call, hidden states [R, H]) -> the tensor to keep.

    Attributes:
        counts: int64 [experts], rows that each expert got.
    """

    def __init__(self, module: nn.Module, keep: Callable[[int, torch.Tensor], torch.Tensor] | None = None):
        self.module, self._keep = module, keep or (lambda call, rows: rows.clone())
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        up = getattr(module, expert_weight_names(module)[0])
        self.width = up.shape[1] if module.is_transposed else up.shape[2]
        self.counts = torch.zeros(len(up), dtype=torch.long)
        self._divisor: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
        """hidden [..., H], chosen int [..., k]. Under expert parallelism, numbers beyond those of the experts stand for
        experts on other devices."""
        hidden = hidden.detach().reshape(-1, self.width)
        chosen = chosen.reshape(len(hidden), -1)
        self._calls.append((self._keep(len(self._calls), hidden), chosen.clone()))
        for expert in chosen.unique().tolist():
            if 0 <= expert < len(self.counts):
                self.counts[expert] += (chosen == expert).any(1).sum().item()

    def divide(self, scale: torch.Tensor) -> None:
        """From now on the rows are those that were kept, divided by powers of two [H]."""
        self._divisor = scale

    def inputs(self, name: str, hessian: bool) -> "list[RoutedInputs]":
        """The statistics of both weights of the experts `name`."""
        weights = enumerate(expert_weight_names(self.module))
        return [RoutedInputs(f"{name}.{weight}", self, index, hessian) for index, weight in weights]

    def of(self, expert: int, device) -> Iterator[torch.Tensor]:
        """The rows [R, H] of an expert, call by call, on `device`."""
        for hidden, chosen in self._calls:
            is_routed = (chosen == expert).any(1)
            if is_routed.any():
                rows = hidden[is_routed.to(hidden.device)].to(device)
                yield rows if self._divisor is None else rows / self._divisor.to(rows)

    def projected(self, expert: int, device) -> Iterator[torch.Tensor]:
        """What the expert's first weight and activation make of each of them [R, I]."""
        name = expert_weight_names(self.module)[0]
        weight, bias = getattr(self.module, name)[expert], getattr(self.module, name + "_bias", None)
        for rows in self.of(expert, device):
            up = rows @ (weight if self.module.is_transposed else weight.t())
            yield expert_activation(self.module, up if bias is None else up + bias[expert])


@contextmanager
def watching_routes(module: nn.Module, keep: Callable[[int, torch.Tensor], torch.Tensor] | None = None):
    """Inside, the `RoutedRows` that this gives see every call of fused experts."""
    rows = RoutedRows(module, keep)
    hook = module.register_forward_pre_hook(
        lambda module, args, kwargs: rows.add(*[*args, *kwargs.values()][:2]), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


class RoutedInputs(Sequence):
    """`LinearInputs` of one weight of each expert, computed when it is asked for: memory holds those of one expert. An
    expert that no row reached has those of all others of its layer.

    Args:
        name: of the weight.
        index: 0 for the first weight of the experts, 1 for the second.
        hessian: whether to accumulate hessians.
    """

    def __init__(self, name: str, rows: RoutedRows, index: int, hessian: bool):
        self.name, self.rows, self.index, self.hessian = name, rows, index, hessian
        weight = getattr(rows.module, expert_weight_names(rows.module)[index])
        self.device, self.width = weight.device, weight.shape[1] if rows.module.is_transposed else weight.shape[2]
        self._all = None

    def __len__(self) -> int:
        return len(self.rows.counts)

    def __getitem__(self, expert: int) -> LinearInputs:
        if not 0 <= expert < len(self):
            raise IndexError(expert)
        return self._of(expert) if self.rows.counts[expert] else self._merged()

    @property
    def unreached(self) -> list[int]:
        """Experts that no row reached."""
        return (self.rows.counts == 0).nonzero().flatten().tolist()

    @torch.no_grad()
    def of(self, expert: int) -> Iterator[torch.Tensor]:
        """The rows [R, K] that the weight of an expert reads, call by call."""
        yield from (self.rows.projected if self.index else self.rows.of)(expert, self.device)

    def sample(self, expert: int, most: int) -> torch.Tensor:
        """At most `most` of them, evenly spread, float32 [n, K]."""
        step = max(1, -(-int(self.rows.counts[expert]) // most))
        return torch.cat([rows.float() for rows in self.of(expert)])[::step]

    def divide(self, scale: torch.Tensor) -> None:
        """The statistics of both weights become those of hidden states divided by powers of two [H]; the first weights
        are multiplied by them already."""
        self.rows.divide(scale)
        self._all = None

    def merged(self) -> LinearInputs:
        """The statistics of all rows of all experts, a row once for each expert that it was routed to."""
        return self._merged()

    def settle_unreached(self) -> None:
        """Fixes the statistics of experts that no row reached, before weights of the others change."""
        if self.unreached:
            self._merged()

    def _of(self, expert: int) -> LinearInputs:
        inputs = LinearInputs(self.width, self.hessian, f"{self.name}[{expert}]", self.device)
        for rows in self.of(expert):
            inputs.update(rows)
        return inputs

    def _merged(self) -> LinearInputs:
        if self._all is None:
            self._all = LinearInputs(self.width, self.hessian, self.name, self.device)
            for expert in self.rows.counts.nonzero().flatten().tolist():
                self._all.merge(self._of(expert))
        return self._all
