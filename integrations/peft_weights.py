"""The weight of a compressed layer as PEFT's adapters see it: dense to read, and not to be written to."""

import torch

from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule, EfficientLinear


_Tensor = torch.Tensor
_PROPERTIES = ("shape", "dtype", "ndim", "layout", "requires_grad", "grad", "is_leaf")
_METADATA = {  # what needs no dequantized values
    *(getattr(_Tensor, name).__get__ for name in _PROPERTIES),
    *(_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.is_floating_point, _Tensor.is_complex),
}  # fmt: skip
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor")} | {"__setitem__"}


class FrozenWeightError(RuntimeError):
    """Something writes to a weight that is compressed."""


class DenseWeight(torch.Tensor):
    """Stands for a weight of `module`, a `CompressedModule`: shape, dtype and device cost nothing, any operation
    dequantizes the weight and computes with that. Passes for an `nn.Parameter` without a gradient.

    Raises FrozenWeightError where it, or its `data`, is written to.
    """

    @staticmethod
    def of(module: CompressedModule, prefix: str = "", transposed: bool = False) -> "DenseWeight":
        """The weight [out_features, in_features] (experts in front) called `prefix`; `transposed`: its last two
        dimensions swapped."""
        weight = module._compressed[prefix]
        shape = (weight.in_features, weight.out_features) if transposed else (weight.out_features, weight.in_features)
        shape = shape if weight.experts is None else (weight.experts, *shape)
        dtype = module._parameters[prefix[:-1] or "weight"].dtype
        self = torch.empty(shape, dtype=dtype, device="meta").as_subclass(DenseWeight)
        self._is_param, self._of = True, (module, prefix, transposed)
        return self

    @property
    def device(self) -> torch.device:
        module, prefix, _ = self._of
        return module._parameters[prefix[:-1] or "weight"].device

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        """The dequantized weight, an ordinary tensor."""
        module, prefix, transposed = self._of
        weight = module.dequantized(prefix)
        return weight.transpose(-1, -2) if transposed else weight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(args[0] if args else None, DenseWeight):
            if func == _Tensor.data.__get__:
                return args[0]
            if func == _Tensor.requires_grad.__set__ and not args[1]:
                return None
        written = args[:1] if _writes(func.__name__) else (kwargs.get("out"),)
        for tensor in written:
            if isinstance(tensor, DenseWeight):
                module, prefix, _ = tensor._of
                raise FrozenWeightError(
                    f"a weight in {module._compressed[prefix].format} is compressed: it cannot be written to"
                )
        args, kwargs = torch.utils._pytree.tree_map_only(DenseWeight, DenseWeight.dense, (args, kwargs))
        return func(*args, **kwargs)


def _writes(name: str) -> bool:
    """Whether the function of that name writes to its first argument."""
    return name == "__set__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class AdaptedLinear(EfficientLinear):
    """An `EfficientLinear` under an adapter. `weight` reads as that of an `nn.Linear`; the module's parameters, and
    so what is saved and moved, stay those of `EfficientLinear`. Where accelerate holds them elsewhere, `weight` is
    the placeholder."""

    @property
    def weight(self) -> torch.Tensor:
        return self._parameters["weight"] if self.is_offloaded else DenseWeight.of(self)

    def __setattr__(self, name, value):
        if name == "weight" and tuple(value.shape) != PLACEHOLDER_SHAPE:
            raise FrozenWeightError(f"a weight in {self.format} is compressed: it cannot be replaced")
        super().__setattr__(name, value)
