"""Checkpoints of other libraries, loaded into our layers: `hf_efficient.adopt`.

Touches the insides of transformers in one place: the entries of its registries of quantizers and configs are replaced by
subclasses that choose, when a checkpoint is loaded, between the official quantizer and ours.
"""

import functools
import importlib
import importlib.util

from transformers.quantizers import auto


_METHODS = {  # quant_method -> (its name here, the packages that the official quantizer imports, file and class of ours)
    "gptq": ("gptq", ("optimum", "gptqmodel"), "gptq.GPTQ"),
    "awq": ("awq", ("gptqmodel",), "awq.AWQ"),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors",), "compressed_tensors.reader"),
    "bitsandbytes_4bit": ("bitsandbytes", ("bitsandbytes",), "bitsandbytes.BitsAndBytes4bit"),
    "bitsandbytes_8bit": ("bitsandbytes", ("bitsandbytes",), "bitsandbytes.BitsAndBytes8bit"),
    "hqq": ("hqq", ("hqq",), "hqq.HQQ"),
    "torchao": ("torchao", ("torchao",), "torchao.TorchAO"),
    "gguf": ("gguf", (), "gguf.GgufQuantizer"),
}
NAMES = tuple(dict.fromkeys(name for name, _, _ in _METHODS.values()))
_adopted: set[str] = set()


def adopt(*names: str) -> None:
    """Loads checkpoints of other libraries into our layers from now on: `from_pretrained` of a model in one of these formats
    repacks its weights, value for value, and neither imports nor needs the library. Checkpoints of a library that is not
    installed are loaded so in any case.

    Args:
        names: of "gptq", "awq", "compressed-tensors", "bitsandbytes", "hqq", "torchao" and "gguf"; none means all. GGUF files,
            which transformers dequantizes by itself, stay quantized only when they are adopted by name or with all.

    Raises:
        ValueError: for another name.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"adopt({name!r}) is not supported: allowed are {list(NAMES)}")
    register()
    _adopted.update(names or NAMES)


def register() -> None:
    """Makes transformers' registries choose. Idempotent."""
    for method in _METHODS:
        quantizer, config = auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        if not hasattr(quantizer, "_hf_efficient"):
            auto.AUTO_QUANTIZER_MAPPING[method] = _choosing_quantizer(method, quantizer)
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _choosing_config(method, config)
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("bitsandbytes", _NeitherFourNorEight)


class _NeitherFourNorEight:
    """What stands for a bitsandbytes config that says neither; transformers takes such a checkpoint for an ordinary one."""

    @classmethod
    def from_dict(cls, config_dict, *args, **kwargs):
        raise ValueError("quantization_config: of bitsandbytes, but neither load_in_4bit nor load_in_8bit is true")


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _adopts(method: str) -> bool:
    name, packages, _ = _METHODS[method]
    return name in _adopted or not all(map(_is_installed, packages))


def _is_sparse(saved: dict) -> bool:
    return _reader_file("compressed_tensors_sparse").sparse_layout(saved) is not None


def _reader_file(file: str):
    return importlib.import_module(f"hf_efficient.checkpoints.adopt.{file}")


def _ours(method: str):
    file, kind = _METHODS[method][2].split(".")
    return getattr(_reader_file(file), kind)


def _choosing_quantizer(method: str, official: type) -> type:
    class Choosing(official):
        _hf_efficient = True

        def __new__(cls, quantization_config, **kwargs):
            if method == "gguf" and _adopts(method) and not quantization_config.dequantize:
                return _ours(method)(quantization_config)
            kept = hasattr(quantization_config, "_saved")
            if method == "gguf" or not (kwargs.get("pre_quantized", True) and (kept or _adopts(method))):
                return official(quantization_config, **kwargs)
            from hf_efficient.checkpoints.adopt.quantizer import AdoptingQuantizer

            return AdoptingQuantizer(_ours(method)(quantization_config.to_dict()), quantization_config, **kwargs)

    Choosing.__name__ = Choosing.__qualname__ = official.__name__
    return Choosing


def _choosing_config(method: str, official: type) -> type:
    """Configs of what is adopted are kept as they stand in the checkpoint: the class of the library may need the library, and
    may put what it takes for meant in the place of what is there."""

    class Kept(official):
        def __init__(self, saved):
            eight = bool(saved.get("load_in_8bit"))
            own = {"quant_method": method.removesuffix("_4bit").removesuffix("_8bit"), "_saved": saved}
            self.__dict__.update(own, _load_in_8bit=eight, _load_in_4bit=not eight)

        def to_dict(self):
            return dict(self._saved)

        to_diff_dict = to_dict

    class Choosing(official):
        @classmethod
        def from_dict(cls, config_dict, *args, **kwargs):
            sparse = method == "compressed-tensors" and _is_sparse(
                config_dict
            )  # no release that transformers takes reads them
            if sparse or (method != "gguf" and _adopts(method)):
                return Kept(dict(config_dict))
            return official.from_dict(config_dict, *args, **kwargs)

    for kind in (Kept, Choosing):
        kind.__name__ = kind.__qualname__ = official.__name__
    return Choosing
