"""Modules that hold compressed weights: `EfficientLinear` here, fused experts in `hf_efficient.experts`, embeddings in
`hf_efficient.embeddings`."""

import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_efficient.formats import Format
from hf_efficient.kernels.linear.grouped_cpu import ExpertLayouts


# The shape of the tensor in place of a plain module's weight. Savers take all empty tensors for one shared tensor. A
# tensor of one element broadcasts, so that code which adds to a weight it believes dense would compute garbage.
PLACEHOLDER_SHAPE = (3,)


def placeholder(dtype: torch.dtype, device) -> nn.Parameter:
    """The tensor in place of a plain module's weight, which tells other code the layer's dtype and device. Its shape
    makes every loader without hf_efficient fail instead of running on garbage."""
    return nn.Parameter(torch.zeros(PLACEHOLDER_SHAPE, dtype=dtype, device=device), requires_grad=False)


# Several threads may make the first forward. One lock serves all modules: a module's own would be copied and pickled.
_DERIVING = threading.RLock()


@dataclass(frozen=True)
class CompressedWeight:
    """One weight [out_features, in_features] of a module, or those of `experts` stacked, in `format`. Its canonical
    tensors are Parameters: `<prefix>qweight`, `<prefix>scale`, ..."""

    prefix: str
    out_features: int
    in_features: int
    format: Format
    experts: int | None = None

    def names(self) -> dict[str, str]:
        """Canonical tensor -> name of its Parameter."""
        return {name: self.prefix + name for name in self.format.shapes(self.out_features, self.in_features)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a Parameter -> its shape. Raises ValueError where the format is one of other experts."""
        if self.format.experts not in (None, self.experts):
            number = "no experts" if self.experts is None else f"{self.experts} experts"
            raise ValueError(f"bits of {self.format.experts} experts for a weight of {number}")
        sizes = self.out_features, self.in_features
        is_one = self.experts is None
        shapes = self.format.shapes(*sizes) if is_one else self.format.stacked_shapes(self.experts, *sizes)
        return {self.prefix + name: shape for name, shape in shapes.items()}


class CompressedModule(nn.Module):
    """The base class of modules with compressed weights.

    Canonical Parameters are loaded, saved and moved. A device layout is derived from them on first use. It may replace
    `qweight` and `scale` in memory, and gives them back when the module is saved, moved or dequantized. Canonical
    tensors keep their dtypes when the module is cast, so that no number is rounded again.

    A module that accelerate offloads computes from the canonical tensors, which are what accelerate brings to the
    device.
    """

    def _declare(self, weights: list[CompressedWeight], dtype: torch.dtype, device) -> None:
        """Makes the (uninitialized) canonical Parameters of `weights`."""
        self._compressed = {weight.prefix: weight for weight in weights}
        self._layouts = {}
        for weight in weights:
            dtypes = weight.format.dtypes(dtype)
            for name, parameter in weight.names().items():
                tensor = torch.empty(weight.shapes()[parameter], dtype=dtypes[name], device=device)
                self.register_parameter(parameter, nn.Parameter(tensor, requires_grad=False))

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether every parameter was loaded. transformers reads this before it initializes a module, for which some
        models read the shape of the weight."""
        return all(getattr(p, "_is_hf_initialized", False) for p in self.parameters(recurse=False))

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        pass  # the parameters decide

    def compressed_weights(self) -> list[CompressedWeight]:
        """The compressed weights of this module."""
        return list(self._compressed.values())

    def canonical(self, prefix: str = "") -> dict[str, torch.Tensor | None]:
        """The canonical tensors of a weight by name; those that the layout has replaced come from it."""
        parameters = self._compressed[prefix].names()
        tensors = {name: self._parameters.get(parameter) for name, parameter in parameters.items()}
        return tensors | {name: self._from_layout(prefix, name) for name in tensors if tensors[name] is None}

    def _from_layout(self, prefix: str, name: str) -> torch.Tensor:
        """A canonical tensor that the layout has replaced."""
        layouts = self._layouts[prefix]
        weight = self._compressed[prefix]
        if isinstance(layouts, list) and weight.experts is not None:
            return weight.format.stack([{name: layout.replaced[name]()} for layout in layouts])[name]
        return self._as_list(layouts)[0].replaced[name]()

    def _replaced(self) -> dict[str, tuple[str, str]]:
        """Parameter that a layout has replaced -> (prefix of the weight, canonical tensor)."""
        return {
            parameter: (weight.prefix, name)
            for weight in self.compressed_weights()
            for name, parameter in weight.names().items()
            if parameter not in self._parameters
        }

    def dequantized(self, prefix: str = "", dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [out_features, in_features] (experts in front) in `dtype`, by default the compute dtype."""
        weight = self._compressed[prefix]
        dtype = dtype or self._parameters[prefix[:-1] or "weight"].dtype
        return weight.format.dequantize(self.canonical(prefix), weight.in_features, dtype)

    @property
    def is_offloaded(self) -> bool:
        """Whether accelerate holds this module's weights elsewhere between forwards."""
        hook = getattr(self, "_hf_hook", None)
        return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))

    @torch.no_grad()
    def derive_layouts(self, dtype: torch.dtype) -> None:
        """Derives the missing layouts for inputs of `dtype` on the device of the weights, and drops what a layout
        replaces. Does nothing for weights that are offloaded or on the meta device. Raises RuntimeError in a trace."""
        if len(self._layouts) < len(self._compressed):
            if torch.jit.is_tracing() or type(torch.empty(0, dtype=dtype)) is not torch.Tensor:
                raise RuntimeError("export, trace: the model has not run since it was loaded, moved or copied: run it")
            with _DERIVING:
                self._derive_missing(dtype)

    def _derive_missing(self, dtype: torch.dtype) -> None:
        for prefix, weight in self._compressed.items():
            if prefix in self._layouts or self.is_offloaded or self._parameters[prefix + "qweight"].is_meta:
                continue
            layouts = self._derive(weight, dtype)
            self._layouts[prefix] = layouts
            replaced = self._as_list(layouts)[0].replaced
            for name in replaced:
                del self._parameters[prefix + name]  # not set to None: PEFT asks hasattr
            for name, tensor in self._layout_tensors(prefix).items() if replaced else ():
                self.register_buffer(name, tensor, persistent=False)

    def restore_canonical(self) -> None:
        """Turns every layout back into canonical Parameters."""
        replaced = self._replaced()
        for parameter, (prefix, name) in replaced.items():
            self._parameters[parameter] = nn.Parameter(self._from_layout(prefix, name), requires_grad=False)
        for prefix in dict.fromkeys(prefix for prefix, _ in replaced.values()):
            for name in self._layout_tensors(prefix):
                delattr(self, name)
        self._layouts = {}

    def _layout_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Buffer name -> tensor, of the layouts of a weight. As buffers they count as this module's memory."""
        return {
            f"{prefix}{name}" if self._compressed[prefix].experts is None else f"{prefix}{name}_{index}": tensor
            for index, layout in enumerate(self._as_list(self._layouts[prefix]))
            for name, tensor in layout.tensors.items()
        }

    @staticmethod
    def _as_list(layouts) -> list:
        return layouts if isinstance(layouts, list) else [layouts]

    def _derive(self, weight: CompressedWeight, dtype: torch.dtype):
        """One layout for each expert (or for the weight), or one for all experts together."""
        if weight.experts is not None:
            tensors = {name: tensor.data for name, tensor in self.canonical(weight.prefix).items()}
            if grouped := weight.format.grouped_layout(tensors, weight.in_features, dtype):
                return grouped
        parts, columns = list(self._split(weight)), weight.in_features
        layouts = [format.layout(tensors, columns, dtype) for format, tensors in parts]
        if len({tuple(layout.replaced) for layout in layouts}) > 1:  # some numbers of bits have no kernel
            return [format.dequantized_layout(tensors, columns, dtype) for format, tensors in parts]
        return layouts if weight.experts is None else ExpertLayouts(layouts)

    def _split(self, weight: CompressedWeight) -> Iterator[tuple[Format, dict[str, torch.Tensor]]]:
        """(format, canonical tensors) of the weight, or of that of each expert."""
        tensors = {name: tensor.data for name, tensor in self.canonical(weight.prefix).items()}
        if weight.experts is None:
            yield weight.format, tensors
        for index in range(weight.experts or 0):
            yield weight.format.expert(index), weight.format.unstack(tensors, index, weight.in_features)

    def layouts(self, prefix: str, dtype: torch.dtype):
        """The layouts of a weight for inputs of `dtype`, derived where they are missing: a list of one, a list of one
        for each expert, or a single layout for all experts."""
        if prefix in self._layouts and self._is_outdated(prefix, dtype):
            self.restore_canonical()
        if prefix not in self._layouts:
            self.derive_layouts(dtype)
        layouts = self._layouts.get(prefix)
        if layouts is None:  # offloaded: made for this call only
            columns, parts = self._compressed[prefix].in_features, self._split(self._compressed[prefix])
            return [(f.layout if f.rounds_inputs else f.dequantized_layout)(t, columns, dtype) for f, t in parts]
        return layouts

    def _is_outdated(self, prefix: str, dtype: torch.dtype) -> bool:
        """Whether the layouts are for another dtype than the module has now: PEFT casts the data of Parameters in
        place."""
        has = self._parameters[prefix[:-1] or "weight"].dtype
        return has is dtype and self._as_list(self._layouts[prefix])[0].dtype is not dtype

    def _apply(self, fn, recurse=True):
        self.restore_canonical()
        names = [name for weight in self.compressed_weights() for name in weight.names().values()]
        dtypes = {name: self._parameters[name].dtype for name in names if self._parameters[name].is_floating_point()}
        for name in dtypes:  # as bytes they are not cast to another float dtype
            self._parameters[name] = nn.Parameter(self._parameters[name].data.view(torch.uint8), requires_grad=False)
        try:
            return super()._apply(fn, recurse)
        finally:
            for name, dtype in dtypes.items():
                tensor = self._parameters[name].data.view(dtype)
                self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for parameter, replaced in self._replaced().items():
            destination[prefix + parameter] = self._from_layout(*replaced)

    def __getstate__(self):
        """Copies and pickles hold canonical tensors, because another machine may need another layout."""
        state = {
            **self.__dict__,
            "_parameters": dict(self._parameters),
            "_buffers": dict(self._buffers),
            "_layouts": {},
        }
        state["_non_persistent_buffers_set"] = set(self._non_persistent_buffers_set)
        replaced = self._replaced()
        for parameter, (prefix, name) in replaced.items():
            tensor = nn.Parameter(self._from_layout(prefix, name), requires_grad=False)
            state["_parameters"][parameter] = tensor
        for prefix in dict.fromkeys(prefix for prefix, _ in replaced.values()):
            for name in self._layout_tensors(prefix):
                del state["_buffers"][name]
                state["_non_persistent_buffers_set"].discard(name)
        return state

    def _load_from_state_dict(self, *args, **kwargs):
        self.restore_canonical()
        super()._load_from_state_dict(*args, **kwargs)


class _FrozenLinear(torch.autograd.Function):
    """y = x @ W^T by a layout, with a gradient of x, through which adapters train."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        y = layout.matmul(x)
        return y.clone() if torch.compiler.is_compiling() or y._is_view() else y  # a view is not changed in place

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layout.dequantize().to(grad.dtype), None


def apply_layout(layout, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in_features] @ W^T + bias by `layout`. x may have any dtype, and a gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        y = _FrozenLinear.apply(x, layout) if x.dtype is layout.dtype else x @ layout.dequantize().to(x.dtype).t()
        return y if bias is None else y + bias.to(y.dtype)
    if x.dtype is layout.dtype:
        return layout.matmul(x, bias)
    return nn.functional.linear(x, layout.dequantize().to(x.dtype), None if bias is None else bias.to(x.dtype))


class SingleWeightModule(CompressedModule):
    """A module with one compressed weight, whose layout is at hand as `_layout` (None: not derived yet)."""

    @property
    def format(self) -> Format:
        """How the weight is stored."""
        return self._compressed[""].format

    def derive_layouts(self, dtype: torch.dtype) -> None:
        super().derive_layouts(dtype)
        self._layout = self._layouts[""][0] if "" in self._layouts else None

    def restore_canonical(self) -> None:
        self._layout = None
        super().restore_canonical()

    def __getstate__(self):
        return {**super().__getstate__(), "_layout": None}


class EfficientLinear(SingleWeightModule, nn.Linear):
    """A linear layer with a frozen compressed weight [out_features, in_features] and an ordinary bias.

    Its Parameters are the canonical tensors of `format` (`qweight`, `scale`, ...), `bias`, and `weight`, a
    `placeholder` in the compute dtype. It derives from `nn.Linear` because PEFT looks for that.

    transposed: whether it replaces a `Conv1D`, whose weight is [in_features, out_features].
    """

    original: type = nn.Linear  # the class that it replaces where it is not transposed

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        format: Format,
        dtype: torch.dtype | None = None,
        device=None,
        transposed: bool = False,
    ):
        nn.Module.__init__(self)
        dtype = dtype or torch.get_default_dtype()
        self.in_features, self.out_features, self.transposed = in_features, out_features, transposed
        self.weight = placeholder(dtype, device)
        bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", bias)
        self._declare([CompressedWeight("", out_features, in_features, format)], dtype, device)
        self._layout = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        if layout is None or x.requires_grad or x.dtype is not layout.dtype:
            return apply_layout(self.layouts("", x.dtype)[0], x, self.bias)
        return layout.matmul(x, self._parameters["bias"])

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.format}"


_FORWARD_ONLY = {"__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__", "forward"}


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes a linear layer: an `nn.Linear`, or of a class that `adds_bias_apart`."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and adds_bias_apart(type(module)))


@functools.cache
@torch.no_grad()
def adds_bias_apart(cls: type) -> bool:
    """Whether a subclass of `nn.Linear` rounds `x @ W^T` to the dtype of x before it adds the bias (Falcon), and
    changes nothing else. Decided by running it: on random bfloat16 numbers the bits must be the same."""
    if cls.__bases__ != (nn.Linear,) or "forward" not in vars(cls) or not vars(cls).keys() <= _FORWARD_ONLY:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, device="cpu").bfloat16() for shape in ((64, 32), (16, 32), (16,))
    )
    with torch.random.fork_rng(devices=[]):
        layers = [cls(32, 16, has_bias, device="cpu", dtype=torch.bfloat16) for has_bias in (True, False)]
    for layer in layers:
        layer.weight.copy_(weight)
    layers[0].bias.copy_(bias)
    product = x @ weight.T
    try:
        found = [layer(x) for layer in layers]
    except Exception:  # it has another signature
        return False
    return torch.equal(found[0], product + bias) and torch.equal(found[1], product)


class BiasApartLinear(EfficientLinear):
    """Replaces a class that adds the bias to the rounded product (see `adds_bias_apart`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = apply_layout(self.layouts("", x.dtype)[0], x, None)
        return y if self.bias is None else y + self.bias


def stand_in(module: nn.Module, format: Format) -> EfficientLinear:
    """The `EfficientLinear`, uninitialized and on the meta device, that replaces `module`: a linear layer (see
    `is_linear`) or transformers' `Conv1D`."""
    transposed = not isinstance(module, nn.Linear)
    in_features, out_features = module.weight.shape if transposed else module.weight.shape[::-1]
    is_apart = not transposed and type(module) is not nn.Linear and adds_bias_apart(type(module))
    cls = BiasApartLinear if is_apart else EfficientLinear
    new = cls(in_features, out_features, module.bias is not None, format, module.weight.dtype, "meta", transposed)
    if is_apart:
        new.original = type(module)
    return new


def compress_linear(module: nn.Module, format: Format, tensors: dict[str, torch.Tensor]) -> EfficientLinear:
    """The `EfficientLinear` that replaces `module`, as `stand_in`, with the canonical `tensors` of its weight and the
    same bias."""
    new, dtype = stand_in(module, format), module.weight.dtype
    new.weight, new.bias = placeholder(dtype, module.weight.device), module.bias
    for name, shape in format.shapes(new.out_features, new.in_features).items():
        tensor, expected = tensors[name], format.dtypes(dtype)[name]
        if tuple(tensor.shape) != shape or tensor.dtype != expected:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: {format} has {expected} {shape}")
        setattr(new, name, nn.Parameter(tensor.to(module.weight.device), requires_grad=False))
    return new.train(module.training)
