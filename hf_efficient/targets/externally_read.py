"""Linear layers whose weight is read by code outside their forward. They cannot be compressed: that code needs the
dense weight."""

import contextlib
import copy
import inspect

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_efficient.experts import is_fused_experts
from hf_efficient.integrations.transformers_compat import set_attention
from hf_efficient.integrations.transformers_layers import read_outside_forward


_TOKENS = 8
_SAMPLES = 4000  # of sound


def read_elsewhere(model: nn.Module, names: list[str]) -> set[str]:
    """Those of the linear layers called `names` whose weight is read outside their own forward: what one forward of a
    copy of `model` (whose parameters are on the meta device) shows, and what `read_outside_forward` knows. A forward
    that fails there shows what it has read until then."""
    found = read_outside_forward(model).intersection(names)
    twin = copy.deepcopy(model).eval()
    observer = _Observer(twin, names)
    # meta tensors have no values, and some forwards branch on values: these end in an exception
    with torch.device("meta"), torch.no_grad(), contextlib.suppress(Exception), observer:
        twin(**_inputs(twin))
    return found | observer.read


def _inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Arguments for a forward of `model`, which is made ready for the meta device."""
    # late: transformers imports this while it is itself imported
    from hf_efficient.planning.model_trace import ATTENTION

    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    for config in configs:
        set_attention(config, ATTENTION)
        if model.main_input_name == "input_ids":
            config.pad_token_id = None  # else some models look for it there
    for module in model.modules():
        if is_fused_experts(module):
            module.forward = lambda hidden_states, *args, **kwargs: torch.empty_like(hidden_states)
    sides, channels = (
        next((getattr(config, name) for config in configs if getattr(config, name, None)), default)
        for name, default in (("image_size", 224), ("num_channels", 3))
    )
    sides = tuple(sides) if isinstance(sides, (list, tuple)) else (sides, sides)
    shapes = {"pixel_values": (1, channels, *sides), "input_values": (1, _SAMPLES)}
    ids, given = torch.zeros(1, _TOKENS, dtype=torch.long), {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if name in ("input_ids", "decoder_input_ids"):
            given[name] = ids
        elif name in shapes and (name == model.main_input_name or parameter.default is parameter.empty):
            given[name] = torch.empty(shapes[name], dtype=model.dtype)
    return given


class _Observer(TorchDispatchMode):
    """Notes the linear layers of `model` among `names` whose weight an operator reads while no module that holds it
    runs."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.read, self.running = set(), []
        self.names = {model.get_submodule(name).weight.untyped_storage()._cdata: name for name in names}
        for module in model.modules():
            held = {p.untyped_storage()._cdata for p in module.parameters(recurse=False)} & self.names.keys()
            if held:
                module.register_forward_pre_hook(lambda *_, held=held: self.running.append(held))
                module.register_forward_hook(lambda *_: self.running.pop() and None, always_call=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                if key in self.names and not any(key in held for held in self.running):
                    self.read.add(self.names[key])
        return func(*args, **(kwargs or {}))
