"""A feed-forward layer that computes few rows with the neurons they need, and many rows whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.kernels.linear.contextual_mlp import ACTIVATIONS, choose


MOST_ROWS = 8  # more rows together need most neurons, and the whole layer is no slower
CHOICE = ("project", "score", "score_up", "limit", "spread")  # the tensors that choose neurons, see `predictor`
# names of the linears of a feed-forward layer
_GATED = ("gate_proj", "up_proj", "down_proj")
_PLAIN = (("up_proj", "down_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "activation")


@dataclass(frozen=True)
class Place:
    """Where a feed-forward layer is in a model.

    Attributes:
        name: full name of the module that becomes a `ContextualMLP`: the layer, or its first linear where the linears
            are children of a whole decoder block.
        parent: full name of the module whose children the linears are.
        linears: names of the linears in `parent`: gate (or the only first one), up (where there is one) and down.
        activation_name: attribute of `parent` that holds the activation.
        activation: its name in `ACTIVATIONS`.
    """

    name: str
    parent: str
    linears: tuple[str, ...]
    activation_name: str
    activation: str

    @property
    def is_alone(self) -> bool:
        """Whether the linears have a module of their own."""
        return self.name == self.parent


def find_places(model: nn.Module) -> list[Place]:
    """The feed-forward layers of `model`, in order.

    Raises:
        ValueError: there is none, or one has weights or an activation that are not supported.
    """
    places, refused = [], None
    for name, module in model.named_modules():
        if isinstance(module, ContextualMLP):
            raise ValueError(f"{name} is contextually sparse already: load the model anew")
        children = dict(module.named_children())
        linears = next((names for names in (_GATED, *_PLAIN) if set(names) <= set(children)), None)
        if linears is None:
            continue
        types = {part: type(children[part]).__name__ for part in linears if type(children[part]) is not nn.Linear}
        if types:
            raise ValueError(
                f"{name}: contextual sparsity reads rows of plain weights (nn.Linear), its parts are {types}: take the "
                "model before it is compressed or given adapters"
            )
        acting = next((key for key in _ACTIVATION_NAMES if callable(getattr(module, key, None))), None)
        activation = acting and _name_of(getattr(module, acting))
        if activation is None:
            refused = f"{name}: its activation is none of {', '.join(ACTIVATIONS)}"
            continue
        rest = set(children) - {*linears, acting}
        alone = all(isinstance(children[key], (nn.Dropout, nn.Identity)) for key in rest)
        if linears == _GATED and not alone:
            refused = f"{name}: {', '.join(sorted(rest))} between its linears is not served"
            continue
        places.append(Place(name if alone else f"{name}.{linears[0]}", name, linears, acting, activation))
    if refused or not places:
        names = " or ".join(map(str, (_GATED, *_PLAIN)))
        raise ValueError(refused or f"{type(model).__name__} has no feed-forward layer of linears named {names}")
    return places


def _name_of(activation) -> str | None:
    """The name in `ACTIVATIONS` of a function that gives the same values."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float32)
    return next((name for name, f in ACTIVATIONS.items() if torch.allclose(activation(x), f(x), atol=1e-5)), None)


class ContextualMLP(nn.Module):
    """Takes the place of a feed-forward layer, with its parameters under their names, so `save_pretrained` writes the
    dense model.

    Up to `most_rows` rows of x get the neurons that the predictor chooses. Everything else is computed whole: prompts,
    training, and layers whose linears were replaced, by adapters for example. The weight of the last linear keeps its
    shape but is transposed in memory, so that the weights of a neuron are contiguous.

    Args:
        host: the module whose parameters and children this one takes over.
        down: the last linear, where it is no child of `host`.
        choice: name in `CHOICE` -> tensor.

    Attributes:
        most_rows: largest number of rows of x [..., hidden] that are computed sparsely. The neurons of a row do not
            depend on other rows.
        project [rank, hidden], score and score_up [neurons, rank], limit and spread [neurons]: choose the neurons, see
            `predictor`; not saved with the model.
    """

    def __init__(self, host: nn.Module, place: Place, down: nn.Module | None, choice: dict[str, torch.Tensor]):
        super().__init__()
        self._parameters.update(host._parameters)
        self._modules.update(host._modules)
        self.place, self.most_rows = place, MOST_ROWS
        self._down = (down,)  # a tuple, so that it does not become a submodule
        self.train(host.training)
        weight = self._parts()[-1].weight
        weight.data = weight.data.t().contiguous().t()
        for name in CHOICE:
            tensor = choice.get(name)
            tensor = tensor if tensor is None else tensor.to(weight.device, weight.dtype).contiguous()
            self.register_buffer(name, tensor, persistent=False)

    def _parts(self) -> tuple[nn.Module, ...]:
        if self.place.is_alone:
            return tuple(self._modules[name] for name in self.place.linears)
        return self, *self._down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts()
        if x.numel() > self.most_rows * x.shape[-1] or not self._is_plain(parts, x):
            return self._whole(x, parts)
        return torch.ops.hf_efficient.contextual_mlp(x, *self._arguments(parts))

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        """The neurons that are computed for the rows of x [rows, hidden]: bool [rows, neurons]."""
        first = self._parts()[0]
        return choose(x, *self._choice(), first.weight, first.bias, self.place.activation)

    def _choice(self) -> tuple:
        return self.project, self.score, self.score_up, self.limit, self.spread

    def _arguments(self, parts) -> tuple:
        """The arguments of the op `contextual_mlp` after x."""
        gate, *up, down = parts
        up = (up[0].weight, up[0].bias) if up else (None, None)
        return *self._choice(), gate.weight, gate.bias, *up, down.weight.t(), down.bias, self.place.activation

    def _is_plain(self, parts, x: torch.Tensor) -> bool:
        if torch.is_grad_enabled() and (x.requires_grad or any(part.weight.requires_grad for part in parts)):
            return False
        return not self.place.is_alone or all(type(part) is nn.Linear for part in parts)

    def _whole(self, x: torch.Tensor, parts) -> torch.Tensor:
        act = ACTIVATIONS[self.place.activation]
        if not self.place.is_alone:
            down = parts[-1]
            return F.linear(act(F.linear(x, self.weight, self.bias)), down.weight, down.bias)
        values = act(parts[0](x))
        return parts[-1](values * parts[1](x) if len(parts) == 3 else values)


class Passed(nn.Module):
    """Holds the parameters of a linear that a `ContextualMLP` computes with; its forward is the identity."""

    def __init__(self, host: nn.Module):
        super().__init__()
        self._parameters.update(host._parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def put(model: nn.Module, place: Place, choice: dict[str, torch.Tensor]) -> ContextualMLP:
    """Puts a `ContextualMLP` with the tensors `choice` (name in `CHOICE` -> tensor) at `place`."""
    parent, down = model.get_submodule(place.parent), None
    if not place.is_alone:
        down = Passed(getattr(parent, place.linears[-1]))
        setattr(parent, place.linears[-1], down)
        setattr(parent, place.activation_name, nn.Identity())
    layer = ContextualMLP(model.get_submodule(place.name), place, down, choice)
    model.set_submodule(place.name, layer)
    return layer


def layers_of(model: nn.Module) -> dict[str, ContextualMLP]:
    """Full name -> layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ContextualMLP)}


@contextmanager
def every_row(model: nn.Module) -> Iterator[None]:
    """Inside, prompts are computed sparsely too, as when tokens are read one by one, to measure what sparsity loses."""
    layers = layers_of(model).values()
    before = [layer.most_rows for layer in layers]
    for layer in layers:
        layer.most_rows = float("inf")
    try:
        yield
    finally:
        for layer, rows in zip(layers, before):
            layer.most_rows = rows
