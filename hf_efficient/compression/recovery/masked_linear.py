"""Linear layers while they are trained after pruning: float32 weights whose pruned entries stay zero."""

import copy
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import CompressedModule, EfficientLinear


# attributes that make `save_pretrained` and Trainer treat a model as quantized
_OF_A_QUANTIZED_MODEL = ("hf_quantizer", "is_quantized", "quantization_method", "save_pretrained", "push_to_hub")


class MaskedLinear(nn.Linear):
    """Takes the place of a linear layer while it is trained. Computes in the dtype of its input.

    Attributes:
        weight: float32 [N, K], 0 where pruned.
        mask: [N, K] in the dtype of the layer, 1 = kept and 0 = pruned; None for a dense layer. Pruned entries get no
            gradient, so an optimizer that works element by element leaves them 0.
    """

    def __init__(self, origin: nn.Module):
        nn.Module.__init__(self)
        self._origin = (origin,)  # a tuple, so that it does not become a submodule
        self.transposed = isinstance(origin, Conv1D) or getattr(origin, "transposed", False)
        sparse = isinstance(origin, EfficientLinear)
        mask = origin.format.mask(origin.canonical(), origin.in_features).to(self.dtype()) if sparse else None
        weight = origin.dequantized(dtype=torch.float32) if sparse else origin.weight.detach().float()
        weight = weight.t() if self.transposed and not sparse else weight
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.contiguous().clone())
        self.bias = origin.bias
        self.register_buffer("mask", mask, persistent=False)
        self.train(origin.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, masked_cast(self.weight, self.mask, x.dtype), self.bias)

    def dtype(self) -> torch.dtype:
        """Dtype of the weight before and after training."""
        return self._origin[0].weight.dtype

    @torch.no_grad()
    def packed(self) -> nn.Module:
        """The original layer with this weight, rounded to its dtype."""
        origin = self._origin[0].to(self.weight.device)
        weight = self.weight.to(self.dtype())
        if isinstance(origin, EfficientLinear):
            tensors = origin.format.pack(weight, self.mask.bool())
            origin.restore_canonical()
            for name, tensor in tensors.items():
                origin._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            origin.weight.copy_(weight.t() if self.transposed else weight)
        return origin.train(self.training)


def masked_cast(weight: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """weight [N, K] in `dtype`; its gradient is 0 where mask ([N, K] of 0 and 1, or None) is 0."""
    return _MaskedCast.apply(weight, mask, dtype)


class _MaskedCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, mask, dtype):
        ctx.mask, ctx.dtype = mask, weight.dtype
        return weight.to(dtype, copy=True)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.mask is not None:
            gradient = gradient * ctx.mask
        return gradient.to(ctx.dtype), None, None


def unpack(model) -> None:
    """Makes the linear layers of `model` trainable in place: every sparse layer and every plain one becomes a
    `MaskedLinear`. Everything else is frozen: the output embedding, tied weights, quantized layers and all other
    parameters. `pack` and `discard` undo it.

    Raises:
        ValueError: nothing to train, or sparse layers that hold codes.
    """
    head = model.get_output_embeddings()
    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, CompressedModule):
            if isinstance(getattr(module, "format", None), MaskedFormat):
                found[name] = module
        elif isinstance(module, (nn.Linear, Conv1D)) and module is not head and shared[id(module.weight)] == 1:
            found[name] = module
    coded = [n for n, m in found.items() if isinstance(m, EfficientLinear) and m.format.weights is not None]
    if coded:
        raise ValueError(
            f"{len(coded)} sparse layers hold quantized values, for example {coded[:2]}: recover the model with "
            "weights=None in its SparseConfig, and quantize what comes out"
        )
    if _masked_linears(model):
        raise ValueError("the model is being trained already: pack(model) ends that")
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer to train: all are quantized, tied or outputs")
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    for name, module in found.items():
        model.set_submodule(name, MaskedLinear(module))
    state = {key: model.__dict__.pop(key) for key in _OF_A_QUANTIZED_MODEL if key in model.__dict__}
    model._before_training = state, model.config, learned
    model.config = copy.copy(model.config)  # checkpoints of the training hold dense weights
    model.config.__dict__.pop("quantization_config", None)


def pack(model) -> None:
    """Puts the layers of before `unpack` back, with the trained weights and the same masks.

    Raises:
        ValueError: a weight is NaN or infinite; the model stays as it is.
    """
    trained = _masked_linears(model)
    broken = [name for name, module in trained.items() if not module.weight.isfinite().all()]
    if broken:
        raise ValueError(f"training diverged: {len(broken)} weights are NaN or infinite, for example {broken[:2]}")
    _restore(model, {name: module.packed() for name, module in trained.items()})


def discard(model) -> None:
    """Puts the layers of before `unpack` back, with the weights they had."""
    trained = _masked_linears(model)
    _restore(model, {name: module._origin[0].to(module.weight.device) for name, module in trained.items()})


def _masked_linears(model) -> dict[str, MaskedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MaskedLinear)}


def _restore(model, layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    state, model.config, learned = model.__dict__.pop("_before_training")
    model.__dict__.pop("_is_accelerate_prepared", None)  # accelerate sets it in Trainer
    model.__dict__.update(state)
    for parameter in learned:
        parameter.requires_grad_(True)
