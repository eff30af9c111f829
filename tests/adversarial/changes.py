"""What users do to a loaded model between two calls. Plain torch and transformers: a process without the plugin runs it
too.

Each change is a function (model, number) -> None or a function that takes it back; `number` is drawn, and decides which
layer and how strongly. What is patched in a class or module of transformers is taken back at the end of a session.
"""

import sys
import types
from dataclasses import dataclass

import torch
from torch import nn


CHANGES = {}


def change(function):
    CHANGES[function.__name__] = function
    return function


def decoder_layers(model) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def parts(model, *names: str) -> list[nn.Module]:
    """The modules whose class is called like one of `names`."""
    return [module for module in model.modules() if any(name in type(module).__name__ for name in names)]


def draw(modules: list, number: int):
    return modules[number % len(modules)] if modules else None


@dataclass
class Control:
    vector: torch.Tensor
    strength: float
    operator: object


class Steered(nn.Module):
    """A layer with a vector added to what it gives, as repeng wraps layers."""

    def __init__(self, block, width: int, number: int):
        super().__init__()
        self.block = block
        generator = torch.Generator().manual_seed(number)
        self.control = Control(torch.randn(width, generator=generator), 0.5 + number % 5, lambda x, y: x + y)

    def forward(self, *args, **kwargs):
        output = self.block(*args, **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        control = self.control
        states = control.operator(states, control.strength * control.vector.to(states.dtype))
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)


class SmoothActivation(nn.Module):
    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return x * torch.sigmoid(self.slope * x)


@change
def wrap_a_layer(model, number):
    layers = decoder_layers(model)
    index = number % len(layers)
    if not isinstance(layers[index], Steered):
        layers[index] = Steered(layers[index], model.config.hidden_size, number)


@change
def steer_otherwise(model, number):
    for steered in parts(model, "Steered"):
        kind = number % 4
        if kind == 0:
            steered.control.strength += 1.5
        elif kind == 1:
            steered.control.vector = -steered.control.vector
        elif kind == 2:
            steered.control.operator = lambda x, y: x - y
        else:
            steered.control.vector.mul_(0.5)


@change
def unwrap(model, number):
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        if isinstance(layer, Steered):
            layers[index] = layer.block


@change
def replace_activation(model, number):
    for mlp in parts(model, "MLP"):
        for name in ("act_fn", "act"):
            if hasattr(mlp, name):
                setattr(mlp, name, SmoothActivation(0.5 + number % 3))


@change
def activation_with_a_plain_function(model, number):
    slope = 0.25 + number % 3
    for mlp in parts(model, "MLP"):
        for name in ("act_fn", "act"):
            if hasattr(mlp, name):
                mlp._modules.pop(name, None)
                setattr(mlp, name, lambda x: x * torch.sigmoid(slope * x))


@change
def other_slope(model, number):
    for activation in parts(model, "SmoothActivation"):
        activation.slope += 1.0 + number % 2


@change
def replace_class(model, number):
    module = draw(parts(model, "MLP", "Attention"), number)
    if module is None or type(module).__name__ == "Halved":
        return
    cls = type(module)

    def forward(self, *args, **kwargs):
        output = cls.forward(self, *args, **kwargs)
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    module.__class__ = type("Halved", (cls,), {"forward": forward})


@change
def scale_attention(model, number):
    module = draw([m for m in parts(model, "Attention") if hasattr(m, "scaling")], number)
    if module is not None:
        module.scaling *= 2.0 + number % 3


@change
def change_epsilon(model, number):
    for norm in parts(model, "Norm"):
        for name in ("variance_epsilon", "eps"):
            if hasattr(norm, name):
                setattr(norm, name, 0.5 + number % 3)


@change
def scale_rope(model, number):
    for rope in parts(model, "Rotary"):
        if hasattr(rope, "attention_scaling"):
            rope.attention_scaling = 1.5 + number % 3


@change
def patch_class_forward(model, number):
    module = draw(parts(model, "MLP", "Attention"), number)
    if module is None:
        return None
    cls = type(module)
    if "forward" not in vars(cls):
        return None
    forward = cls.forward

    def halved(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        return (output[0] * 0.75, *output[1:]) if isinstance(output, tuple) else output * 0.75

    cls.forward = halved
    return lambda: setattr(cls, "forward", forward)


@change
def patch_rotary_function(model, number):
    module = sys.modules[type(model.get_decoder()).__module__]
    original = getattr(module, "apply_rotary_pos_emb", None)
    if original is None:
        return None

    def turned(*args, **kwargs):
        query, key = original(*args, **kwargs)
        return query * (1.5 + number % 2), key

    module.apply_rotary_pos_emb = turned
    return lambda: setattr(module, "apply_rotary_pos_emb", original)


@change
def own_sdpa(model, number):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"]

    def mine(module, query, *args, **kwargs):
        return stock(module, query * (2.0 + number % 2), *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    return lambda: ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)


@change
def own_function_of_torch(model, number):
    stock = nn.functional.scaled_dot_product_attention

    def mine(query, *args, **kwargs):
        return stock(query * 3.0, *args, **kwargs)

    nn.functional.scaled_dot_product_attention = mine
    return lambda: setattr(nn.functional, "scaled_dot_product_attention", stock)


@change
def own_forward_of_one_module(model, number):
    module = draw(parts(model, "MLP", "Norm"), number)
    if module is None or "forward" in vars(module):
        return
    forward = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: forward(*args, **kwargs) * 0.5, module)


@change
def hook(model, number):
    module = draw(parts(model, "MLP", "Norm"), number)
    module.register_forward_hook(lambda module, args, output: output * 1.25 if torch.is_tensor(output) else None)


@change
def pre_hook(model, number):
    module = draw(parts(model, "MLP", "Norm"), number)
    module.register_forward_pre_hook(lambda module, args: tuple(x * 1.25 for x in args))


@change
def remove_hooks(model, number):
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


@change
def scale_a_weight(model, number):
    weights = [p for p in model.parameters() if p.dim() >= 2]
    with torch.no_grad():
        draw(weights, number).mul_(1.5)


@change
def scale_a_weight_behind_its_back(model, number):
    weights = [p for p in model.parameters() if p.dim() >= 2]
    draw(weights, number).data.mul_(0.75)


@change
def new_data(model, number):
    weight = draw([p for p in model.parameters() if p.dim() >= 2], number)
    weight.data = weight.data.flip(0).clone()


@change
def new_parameter(model, number):
    module = draw([m for m in model.modules() if isinstance(m, nn.Linear)], number)
    if module is not None:
        module.weight = nn.Parameter(module.weight.detach().flip(0).clone())


@change
def load_other_weights(model, number):
    generator = torch.Generator().manual_seed(number)
    state = model.state_dict()
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.dim() >= 2:
            tensor.copy_(tensor * (1 + 0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype))
    model.load_state_dict(state)


@change
def swap_layers(model, number):
    layers = decoder_layers(model)
    if len(layers) > 1:
        layers[0], layers[1] = layers[1], layers[0]


@change
def pass_through_layer(model, number):
    class PassThrough(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.attention_type = getattr(layer, "attention_type", "full_attention")

        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    layers = decoder_layers(model)
    index = number % len(layers)
    layers[index] = PassThrough(layers[index])


@change
def leave_the_last_layer_out(model, number):
    parent, name = next(
        (parent, name) for parent in model.modules() for name, child in parent._modules.items()
        if child is decoder_layers(model)
    )  # fmt: skip
    if len(decoder_layers(model)) > 1:
        setattr(parent, name, decoder_layers(model)[:1])


@change
def own_inputs(model, number):
    """A user's subclass that prepares inputs in its own way."""
    cls = type(model)
    if cls.__name__.startswith("Shifted"):
        return

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super(made, self).prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % self.config.vocab_size
        return inputs

    made = type(f"Shifted{cls.__name__}", (cls,), {"__module__": cls.__module__})
    made.prepare_inputs_for_generation = prepare_inputs_for_generation
    model.__class__ = made


@change
def collect_hidden_states(model, number):
    """Leaves transformers' hooks behind."""
    model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)


@change
def change_the_config(model, number):
    for name in ("rms_norm_eps", "final_logit_softcapping", "attn_logit_softcapping"):
        if getattr(model.config, name, None):
            setattr(model.config, name, getattr(model.config, name) * 2)


@change
def a_tensor_beside_the_model(model, number):
    """A buffer that a class's forward reads, registered by hand and changed in place."""
    norm = draw(parts(model, "Norm"), number)
    if not hasattr(norm, "gain"):
        cls = type(norm)
        norm.gain = torch.tensor(0.5)
        norm.__class__ = type("Gained", (cls,), {"forward": lambda self, x: cls.forward(self, x) * self.gain})
    else:
        norm.gain.add_(0.5)


@change
def a_list_of_numbers(model, number):
    norm = draw(parts(model, "Norm"), number)
    if not hasattr(norm, "gains"):
        cls = type(norm)
        norm.gains = [0.5, {"extra": 0.25}]
        forward = lambda self, x: cls.forward(self, x) * (self.gains[0] + self.gains[1]["extra"])  # noqa: E731
        norm.__class__ = type("Listed", (cls,), {"forward": forward})
    else:
        norm.gains[1]["extra"] += 0.5
