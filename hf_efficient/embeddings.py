"""Embeddings with compressed rows, and the modules whose weight is tied to one: one set of codes serves them all."""

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F

from hf_efficient.formats import Format
from hf_efficient.kernels.linear.layout import Layout
from hf_efficient.layers import (
    CompressedModule,
    CompressedWeight,
    EfficientLinear,
    SingleWeightModule,
    apply_layout,
    placeholder,
)


_PACKED = "packed"  # how the names of the buffers begin that are tensors of a layout


def embedding_layout(format: Format, tensors, in_features: int, dtype: torch.dtype, is_multiplied: bool) -> Layout:
    """What an embedding keeps on the device of its canonical `tensors`: a layout that looks rows up and, where an
    output embedding `is_multiplied` with it, multiplies. The codes stay as they are where no layout looks rows up."""
    if is_multiplied:
        return format.layout(tensors, in_features, dtype)
    layout = format.layout(tensors, in_features, dtype) if tensors["qweight"].device.type == "cpu" else None
    has_rows = layout is not None and layout.rows is not None
    return layout if has_rows else format.dequantized_layout(tensors, in_features, dtype)


class EfficientEmbedding(SingleWeightModule, nn.Embedding):
    """An embedding with a frozen compressed weight [num_embeddings, embedding_dim]; ids int64 [...] become rows
    [..., embedding_dim] in the compute dtype, the same bits as those of the dequantized weight.

    Its Parameters are the canonical tensors of its format (`qweight`, `scale`, ...), which has a scale a row or more,
    and `weight`, a `placeholder` in the compute dtype. A subclass of `nn.Embedding` with arithmetic of its own (scaled
    embeddings) is replaced by a class that derives from it and from this one.

    is_multiplied: whether an output embedding is tied to it.
    """

    original: type = nn.Embedding  # the class that it replaces
    is_multiplied = False

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids`. Raises IndexError for ids that are out of range, as an embedding on a CPU does, and TypeError
        for ids that are neither int32 nor int64."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids of {ids.dtype} are no row numbers: allowed are torch.int32 and torch.int64")
        layout, dtype = self._layout, self._parameters["weight"].dtype
        if layout is None or layout.dtype is not dtype:
            layout = self.layouts("", dtype)[0]
        ids = ids.long()
        if layout.rows is not None:
            return layout.rows(ids)
        flat = ids.flatten()
        names = self._compressed[""].names()
        rows = {n: F.embedding(flat, self._parameters[p]) for n, p in names.items() if p in self._parameters}
        if "qweight" not in rows:
            rows["qweight"] = layout.canonical_rows(flat)
        return self.format.dequantize(rows, self.embedding_dim, dtype).view(*ids.shape, self.embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.look_up(ids)

    def _derive(self, weight: CompressedWeight, dtype: torch.dtype):
        def make(tensors, in_features, dtype):
            return embedding_layout(weight.format, tensors, in_features, dtype, self.is_multiplied)

        return [make(tensors, weight.in_features, dtype) for _, tensors in self._split(weight)]

    @property
    def _is_hf_initialized(self) -> bool:
        """transformers computes the scales of embeddings, which no checkpoint holds, where it initializes a module."""
        own = (buffer for name, buffer in self.named_buffers(recurse=False) if not name.startswith(_PACKED))
        is_loaded = all(getattr(p, "_is_hf_initialized", False) for p in self.parameters(recurse=False))
        return is_loaded and all(getattr(buffer, "_is_hf_initialized", False) for buffer in own)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        pass

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


class _Tied(CompressedModule):
    """A module without a weight of its own: that of `source`, an `EfficientEmbedding`, is its weight. Its Parameter
    `weight` is the placeholder of `source`."""

    def _tie(self, source: EfficientEmbedding) -> None:
        self._declare([], source.weight.dtype, source.weight.device)
        self.__dict__["source"] = source  # not a part of this module
        self.weight = source.weight

    @contextlib.contextmanager
    def _source_in_memory(self):
        """Inside, accelerate has brought the weights of `source` to its device, where it holds them elsewhere."""
        if not self.source.is_offloaded:
            yield self.source
            return
        self.source._hf_hook.pre_forward(self.source)
        try:
            yield self.source
        finally:
            self.source._hf_hook.post_forward(self.source, None)

    @property
    def is_offloaded(self) -> bool:
        return self.source.is_offloaded

    @property
    def format(self) -> Format:
        """How the weight is stored."""
        return self.source.format

    def dequantized(self, prefix: str = "", dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.source.dequantized(prefix, dtype)


class TiedEmbedding(_Tied, nn.Embedding):
    """An embedding whose weight is tied to that of an `EfficientEmbedding`, as encoders and decoders share one."""

    original: type = nn.Embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self._source_in_memory() as source:
            return source.look_up(ids)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tied"


class TiedLinear(_Tied, EfficientLinear):
    """An output embedding without bias whose weight is tied to that of an `EfficientEmbedding`: x [..., K] becomes
    x @ W^T [..., N]."""

    def __init__(self, source: EfficientEmbedding):
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.embedding_dim, source.num_embeddings
        self.transposed, self.bias, self._layout = False, None, None
        self._tie(source)

    def layouts(self, prefix: str, dtype: torch.dtype):
        return self.source.layouts(prefix, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layout = self.source._layout
        if layout is not None and not x.requires_grad and x.dtype is layout.dtype:
            return layout.matmul(x)
        with self._source_in_memory():
            return apply_layout(self.layouts("", x.dtype)[0], x, None)

    def derive_layouts(self, dtype: torch.dtype) -> None:
        pass  # `source` has them

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, tied, {self.format}"


def _blank(base: type, original: type) -> nn.Module:
    """An instance of `base` that computes as the class `original` of embeddings does; nothing is in it yet."""
    cls = base if original is nn.Embedding else _class_of(base, original)
    return cls.__new__(cls)


@functools.cache
def _class_of(base: type, original: type) -> type:
    def __reduce_ex__(self, protocol):
        return _blank, (base, original), self.__getstate__()

    own = {"original": original, "__module__": __name__, "__reduce_ex__": __reduce_ex__}
    return type(f"{base.__name__}Of{original.__name__}", (original, base), own)


def _like(module: nn.Embedding, base: type) -> nn.Module:
    """A `base` with the attributes and buffers of the embedding `module`, and without its weight."""
    new = _blank(base, type(module))
    nn.Module.__init__(new)
    new.__dict__.update({name: value for name, value in vars(module).items() if name != "_parameters"})
    new._buffers = dict(module._buffers)
    return new


def embedding_stand_in(module: nn.Embedding, format: Format, is_multiplied: bool) -> EfficientEmbedding:
    """The `EfficientEmbedding`, uninitialized and on the meta device, that replaces `module`."""
    new, dtype = _like(module, EfficientEmbedding), module.weight.dtype
    new.weight, new.is_multiplied, new._layout = placeholder(dtype, "meta"), is_multiplied, None
    new._declare([CompressedWeight("", module.num_embeddings, module.embedding_dim, format)], dtype, "meta")
    return new


def tied_stand_in(module: nn.Module, source: EfficientEmbedding) -> TiedEmbedding | TiedLinear:
    """What replaces `module`, an embedding or a linear layer whose weight is tied to that of `source`."""
    if isinstance(module, nn.Linear):
        return TiedLinear(source).train(module.training)
    new = _like(module, TiedEmbedding)
    new._tie(source)
    return new


def restored(module: EfficientEmbedding | TiedEmbedding) -> nn.Embedding:
    """The ordinary embedding that `module` stands for, without its weight and hook."""
    ours = {"_parameters", "_compressed", "_layouts", "_layout", "source", "is_multiplied"}
    hook = {"_hf_hook", "_old_forward", "forward"}
    new = module.original.__new__(module.original)
    nn.Module.__init__(new)
    new.__dict__.update({name: value for name, value in vars(module).items() if name not in ours | hook})
    new._buffers = {name: buffer for name, buffer in module._buffers.items() if not name.startswith(_PACKED)}
    return new


@torch.no_grad()
def why_not_compressed(module: nn.Module) -> str | None:
    """Why the embedding `module`, on any device, cannot become an `EfficientEmbedding`; None where it can."""
    if not isinstance(module, nn.Embedding):
        return f"is a {type(module).__name__}, no nn.Embedding"
    if module.max_norm is not None:
        return f"has max_norm={module.max_norm}, which changes its weight in every forward"
    probe = _like(module, _Probe)
    probe.weight = placeholder(module.weight.dtype, "meta")
    try:
        probe = probe.to("meta")
        found = probe(torch.zeros(1, 2, dtype=torch.long, device="meta"))
        fits = found.shape == (1, 2, module.embedding_dim)
    except Exception as error:  # it reads the weight, or takes other arguments
        return f"is a {type(module).__name__}, which does more than scale the rows: {error}"
    return None if fits else f"is a {type(module).__name__}, which gives rows of another width"


class _Probe(nn.Embedding):
    """Looks up rows of the right shape, and has a `placeholder` for a weight."""

    original: type = nn.Embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(*ids.shape, self.embedding_dim, dtype=self.weight.dtype, device=ids.device)
