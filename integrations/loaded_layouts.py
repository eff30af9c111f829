"""The layouts of a model that has just been loaded, made of its canonical tensors or taken from
`hf_efficient.kernels.native.layout_cache`."""

import transformers

from hf_efficient.kernels.native.heap import HeapTrimmer, MappedFiles
from hf_efficient.kernels.native.layout_cache import LayoutCache
from hf_efficient.kernels.native.layout_cache import state as state_of_files  # noqa: F401
from hf_efficient.layers import CompressedModule


def derive_all(model, heap: HeapTrimmer, files, before: str | None, conversions: list[str] | None) -> None:
    """Derives the layouts of all modules of `model`, and gives back the memory of what they replace.

    Args:
        heap: counts the bytes of canonical tensors.
        files: of the checkpoint whose tensors the canonical ones are; none where they were computed.
        before: `state_of_files(files)` before they were read; None: layouts are not kept.
        conversions: what transformers did to names and tensors of the files, in words; None: layouts are not kept.
    """
    mapped = MappedFiles(files)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, CompressedModule)}
    weights = [
        f"{name} {w} {_dtype(module, w)}" for name, module in modules.items() for w in module.compressed_weights()
    ]
    before = None if conversions is None else before
    cache = LayoutCache(files, before, (transformers.__version__, *(conversions or ()), *weights))
    # the largest first: while a layout is written, the pages of its source count, too
    for name in sorted(modules, key=lambda name: -sum(x.nbytes for x in modules[name].parameters(recurse=False))):
        with cache.of(name):
            _derive(modules[name], heap, mapped)
    cache.finish()


def _dtype(module: CompressedModule, weight):
    return module._parameters[weight.prefix[:-1] or "weight"].dtype


def _derive(module: CompressedModule, heap: HeapTrimmer, mapped: MappedFiles) -> None:
    weights, arrived = module.compressed_weights(), {}
    dtypes = [_dtype(module, weight) for weight in weights]
    for weight in weights:
        for name in (*weight.names().values(), weight.prefix[:-1] or "weight"):
            if name in module._parameters:  # calibration has derived layouts already
                arrived[name] = module._parameters[name].requires_grad_(False)
                heap.count(arrived[name].nbytes)
    for dtype in dtypes:
        module.derive_layouts(dtype)
    for name, parameter in arrived.items():
        if name not in module._parameters:  # the layout has replaced it
            mapped.release(parameter)
