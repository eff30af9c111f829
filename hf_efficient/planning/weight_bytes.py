"""Bytes of the weights of a model on the meta device: on disk, and in the layouts that a device's kernels read."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_efficient.embeddings import EfficientEmbedding, embedding_layout
from hf_efficient.formats import Format
from hf_efficient.layers import PLACEHOLDER_SHAPE, CompressedModule


_ROWS = 64  # layouts pad rows (output features) to blocks of at most 64


def checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that `save_pretrained` writes; tied tensors count once."""
    persistent = set(model.state_dict(keep_vars=True))
    tensors = {t.untyped_storage()._cdata: t.nbytes for name, t in _named_tensors(model) if name in persistent}
    return sum(tensors.values())


def bytes_by_module(model: nn.Module, kind: str) -> dict[nn.Module, dict]:
    """Module -> {allocation: bytes} of its own parameters and buffers in memory. kind: compressed weights are counted
    in the layouts of this machine's CPU for "cpu", in those of the Triton kernels for "accelerator"."""
    found, layouts = {}, {}
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found[module] = {t.untyped_storage()._cdata: t.nbytes for t in tensors}
        if isinstance(module, CompressedModule):
            dtype = next(p.dtype for p in module.parameters(recurse=False) if p.shape == PLACEHOLDER_SHAPE)
            # of an embedding: whether an output embedding is multiplied with it
            multiplied = module.is_multiplied if isinstance(module, EfficientEmbedding) else None
            for weight in module.compressed_weights():
                key = weight.format, weight.out_features, weight.in_features, dtype, multiplied
                if key not in layouts:
                    layouts[key] = _weight_growth(*key, kind)
                found[module][module, weight.prefix] = (weight.experts or 1) * layouts[key]
    return found


def _weight_growth(format: Format, out_features: int, in_features: int, dtype, multiplied, kind: str) -> int:
    """Bytes that a weight's layout takes beside its canonical tensors.

    A layout consists of equal blocks of rows, so the layouts of two small weights give the size of a large one.
    """
    rows = out_features % _ROWS + _ROWS
    small = _layout_weight_growth(format, min(rows, out_features), in_features, dtype, multiplied, kind)
    if out_features <= rows:
        return small
    block = _layout_weight_growth(format, rows + _ROWS, in_features, dtype, multiplied, kind) - small
    return small + (out_features - rows) // _ROWS * block


def _layout_weight_growth(format: Format, out_features: int, in_features: int, dtype, multiplied, kind: str) -> int:
    def make(tensors):
        if multiplied is None:
            return format.layout(tensors, in_features, dtype)
        return embedding_layout(format, tensors, in_features, dtype, multiplied)

    tensors = format.blank(out_features, in_features, dtype)
    if kind == "accelerator":
        tensors = {name: tensor.as_subclass(_Accelerated) for name, tensor in tensors.items()}
        with _AllocateOnCPU():
            layout = make(tensors)
    else:
        layout = make(tensors)
    replaced = sum(tensors[name].nbytes for name in layout.replaced)
    # torch's operators read scales of the dtype that they want where they lie
    shared = [tensor for name, tensor in tensors.items() if name not in layout.replaced]
    added = [tensor for tensor in layout.tensors.values() if not any(_share_memory(tensor, other) for other in shared)]
    return sum(map(_allocated, added)) - replaced


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.is_mkldnn and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _allocated(tensor: torch.Tensor) -> int:
    """Bytes of the allocation that `tensor` is a part of; an opaque oneDNN tensor tells only its own."""
    return tensor.nbytes if tensor.is_mkldnn else tensor.untyped_storage().nbytes()


class _Accelerated(torch.Tensor):
    """A CPU tensor that claims to be on an accelerator, so that a format derives the accelerator's layout."""

    is_cuda = True
    device = torch.device("cuda")


class _AllocateOnCPU(TorchFunctionMode):
    """Allocates on the CPU what a layout asks for on the device of an `_Accelerated`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return function(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") is not None else kwargs))


def _named_tensors(model: nn.Module):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
