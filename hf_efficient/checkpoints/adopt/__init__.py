"""Checkpoints of other libraries, loaded into our layers: `hf_efficient.adopt`.

The entries of transformers' registries of quantizers and configs are replaced by subclasses that choose, when a
checkpoint is loaded, between the official quantizer and ours.
"""

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass

from transformers.quantizers import auto

from hf_efficient.configs import BitNetConfig
from hf_efficient.integrations.transformers_quantization_configs import READERS
from hf_efficient.integrations.transformers_releases import has, needs


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Method:
    """How checkpoints of one `quant_method` are adopted.

    Args:
        name: what `adopt` calls it; None: they are adopted only with a config of ours.
        packages: those that the official quantizer imports. Of optimum a part: the folder of that name may be ours.
        reader: file and class in this folder.
    """

    name: str | None
    packages: tuple[str, ...]
    reader: str

    @property
    def is_adopted(self) -> bool:
        return self.name in _adopted or not all(map(_is_installed, self.packages))

    def load_reader(self):
        file, name = self.reader.split(".")
        return getattr(importlib.import_module(f"{__name__}.{file}"), name)


_METHODS = {
    "gptq": _Method("gptq", ("optimum.gptq", "gptqmodel"), "gptq.GPTQ"),
    "awq": _Method("awq", ("gptqmodel",), "awq.AWQ"),
    "compressed-tensors": _Method("compressed-tensors", ("compressed_tensors",), "compressed_tensors.reader"),
    "bitsandbytes_4bit": _Method("bitsandbytes", ("bitsandbytes",), "bitsandbytes.BitsAndBytes4bit"),
    "bitsandbytes_8bit": _Method("bitsandbytes", ("bitsandbytes",), "bitsandbytes.BitsAndBytes8bit"),
    "hqq": _Method("hqq", ("hqq",), "hqq.HQQ"),
    "torchao": _Method("torchao", ("torchao",), "torchao.TorchAO"),
    "gguf": _Method("gguf", (), "gguf.GgufQuantizer"),
    "bitnet": _Method(None, (), "bitnet.BitNet"),
}
NAMES = tuple(dict.fromkeys(method.name for method in _METHODS.values() if method.name))
_adopted: set[str] = set()


def adopt(*names: str) -> None:
    """Loads checkpoints of other libraries into this package's layers from now on.

    `from_pretrained` then repacks the weights of such a checkpoint, value for value, without the library. Checkpoints
    of a library that is not installed are loaded in this way without a call of `adopt`.

    Args:
        names: of "gptq", "awq", "compressed-tensors", "bitsandbytes", "hqq", "torchao" and "gguf"; none means all. GGUF
            files, which transformers dequantizes, stay quantized only after `adopt("gguf")` or `adopt()`. That needs
            transformers 5.17. With an older one the first `adopt()` says that they are dequantized.

    Raises:
        ValueError: another name, or "gguf" with an older transformers.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"adopt({name!r}) is not supported: allowed are {list(NAMES)}")
    if "gguf" in names:
        needs("5.17", "adopt('gguf')")
    elif not names and not has("5.17") and "gguf" not in _adopted:
        logger.warning("adopt(): GGUF files are dequantized; keeping them quantized needs transformers 5.17 or later")
    register()
    _adopted.update(names or NAMES)


def register() -> None:
    """Makes transformers' registries choose. Idempotent."""
    for method in filter(auto.AUTO_QUANTIZER_MAPPING.__contains__, _METHODS):
        quantizer, config = auto.AUTO_QUANTIZER_MAPPING[method], auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        if not hasattr(quantizer, "_hf_efficient"):
            auto.AUTO_QUANTIZER_MAPPING[method] = _quantizer_choice(method, quantizer)
            auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _config_choice(method, config)
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("bitsandbytes", _NeitherFourNorEight)
    READERS["bitnet"] = _read_bitnet


def _read_bitnet(saved: dict, given):
    """What a checkpoint of transformers' `BitNetQuantConfig` is read with, where the caller gives a `BitNetConfig`."""
    if isinstance(given, BitNetConfig):
        return auto.AUTO_QUANTIZATION_CONFIG_MAPPING["bitnet"].adopted(saved, given)


class _NeitherFourNorEight:
    """What stands for a bitsandbytes config that says neither; transformers takes such a checkpoint for an ordinary
    one."""

    @classmethod
    def from_dict(cls, config_dict, *args, **kwargs):
        raise ValueError("quantization_config: of bitsandbytes, but neither load_in_4bit nor load_in_8bit is true")


@functools.cache
def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # nor what it is a part of
        return False


def _is_sparse(saved: dict) -> bool:
    """Whether a config of compressed-tensors names a sparse layout, which no release that transformers takes reads."""
    from hf_efficient.checkpoints.adopt.compressed_tensors_sparse import sparse_layout

    return sparse_layout(saved) is not None


def _quantizer_choice(name: str, official: type) -> type:
    method = _METHODS[name]

    class QuantizerChoice(official):
        _hf_efficient = True

        def __new__(cls, quantization_config, **kwargs):
            if name == "gguf" and method.is_adopted and not quantization_config.dequantize:
                return method.load_reader()(quantization_config)
            is_adopted = hasattr(quantization_config, "_saved") or method.is_adopted
            if name == "gguf" or not (kwargs.get("pre_quantized", True) and is_adopted):
                return official(quantization_config, **kwargs)
            from hf_efficient.checkpoints.adopt.quantizer import AdoptingQuantizer

            given = getattr(quantization_config, "_given", None)
            foreign = method.load_reader()(quantization_config.to_dict(), *([] if given is None else [given]))
            return AdoptingQuantizer(foreign, quantization_config, **kwargs)

    QuantizerChoice.__name__ = QuantizerChoice.__qualname__ = official.__name__
    return QuantizerChoice


def _config_choice(name: str, official: type) -> type:
    method = _METHODS[name]

    class AdoptedConfig(official):
        """A config as it stands in the checkpoint. The class of the library may need the library, and may fill in
        values that the checkpoint does not have. given: a config of ours that the caller asked for."""

        def __init__(self, saved, given=None):
            eight = bool(saved.get("load_in_8bit"))
            quant_method = name.removesuffix("_4bit").removesuffix("_8bit")
            own = {"quant_method": quant_method, "_saved": saved, "_load_in_8bit": eight, "_load_in_4bit": not eight}
            if given is not None:
                own |= {"_given": given, "dequantize": given.dequantize}
            self.__dict__.update(own)

        def to_dict(self):
            return dict(self._saved)

        to_diff_dict = to_dict

    class ConfigChoice(official):
        adopted = AdoptedConfig

        @classmethod
        def from_dict(cls, config_dict, *args, **kwargs):
            is_sparse = name == "compressed-tensors" and _is_sparse(config_dict)
            if is_sparse or (name != "gguf" and method.is_adopted):
                return AdoptedConfig(dict(config_dict))
            return official.from_dict(config_dict, *args, **kwargs)

    for kind in (AdoptedConfig, ConfigChoice):
        kind.__name__ = kind.__qualname__ = official.__name__
    return ConfigChoice
