"""The projections into and out of a layer with a recurrent state, for all tokens of a forward at once."""

from collections.abc import Iterator
from threading import get_ident

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_efficient.integrations.transformers_loop import SCALES_OF_STATES


class Projections:
    """While `mixer` reads the tokens of a forward one by one, its dense `in_proj...` and `out_proj` read all at once:
    their weights are read from memory once. The layer's output must be what `out_proj` returns.

    column: of the token that is read now.
    """

    def __init__(self, mixer: nn.Module):
        dense = {name: child for name, child in mixer.named_children() if type(child) is nn.Linear}
        self.into = [child for name, child in dense.items() if name.startswith("in_proj")]
        self.out = dense.get("out_proj")
        self.scale = next((getattr(mixer, name) for name in SCALES_OF_STATES if hasattr(mixer, name)), None)
        self.column, self._hidden = 0, None

    def begin(self, hidden: torch.Tensor) -> None:
        """hidden: [rows, tokens, size], what the layer reads."""
        self.column, self._read = 0, []
        self._hidden = hidden if self.scale is None else hidden * self.scale
        self._made: dict[nn.Module, torch.Tensor] = {}
        if hidden.shape[1] == 1:
            self._hidden = None

    def end(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The layer's output, [rows, tokens, size], from those of each token."""
        is_used, self._hidden = self._hidden is not None and self.out is not None, None
        return self.out.forward(torch.cat(self._read, 1)) if is_used else torch.cat(outputs, 1)

    def hooks(self, thread: int) -> Iterator[RemovableHandle]:
        """On the projections, for forwards on that thread."""

        def is_used() -> bool:
            return self._hidden is not None and get_ident() == thread

        def read_nothing(module, args):  # `take` has what follows from it
            return (args[0][:, :0],) if is_used() else None

        def take(module, args, output):
            if not is_used():
                return None
            if module not in self._made:
                self._made[module] = module.forward(self._hidden)
            return self._made[module][:, self.column : self.column + 1]

        def keep(module, args):
            if not is_used():
                return None
            self._read.append(args[0])
            return (args[0][:, :0],)

        for module in self.into:
            yield module.register_forward_pre_hook(read_nothing)
            yield module.register_forward_hook(take)
        if self.out is not None:
            yield self.out.register_forward_pre_hook(keep)
