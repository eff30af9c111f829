"""What a user asks for: which weights are compressed, and how. Plain data that survives a round trip through JSON."""

import fnmatch
import pkgutil
import re
from pathlib import Path
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin


CONFIG_VERSION = 1
WEIGHT_BITS = (4, 8)
_SCHEME_FIELDS = ("bits", "group_size", "symmetric", "method")


def available_methods() -> list[str]:
    """Names of the weight quantization methods: the files of `hf_efficient/methods`."""
    return sorted(
        m.name
        for m in pkgutil.iter_modules([str(Path(__file__).parents[1] / "methods")])
        if not m.name.startswith("_")
    )


def module_matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module `name` or one that contains it.

    A pattern is a glob (`*` also crosses dots) over whole dotted parts, anywhere in the name: `k_proj`, `layers.0` (not
    layer 10), `vision_tower` (also as `model.vision_tower`), `layers.*.mlp.down_proj`, `*.self_attn.*`.
    """
    inner = re.sub(r"\\[zZ]$", "", fnmatch.translate(pattern))
    return re.search(rf"(?:^|\.)(?:{inner})(?:\.|$)", name) is not None


def _scheme_error(field: str, value: Any) -> str | None:
    """What is wrong with one field of a scheme, or None."""
    if field == "bits":
        allowed, ok = f"one of {WEIGHT_BITS}", type(value) is int and value in WEIGHT_BITS
    elif field == "group_size":
        allowed = "a positive multiple of 8, -1 (one group per output channel) or None (one scale for the tensor)"
        ok = value is None or (type(value) is int and (value == -1 or (value > 0 and value % 8 == 0)))
    elif field == "symmetric":
        allowed, ok = "True or False", isinstance(value, bool)
    elif field == "method":
        allowed, ok = f"one of {available_methods()}", value in available_methods()
    else:
        return f"{field!r} is not a field that an override can set: allowed are {list(_SCHEME_FIELDS)}"
    return None if ok else f"{field}={value!r} is not supported: it must be {allowed}"


class WeightOnlyConfig(QuantizationConfigMixin):
    """Weights in few bits, activations as they are. Pass it as `quantization_config` to `from_pretrained`.

    A weight [out_features, in_features] becomes unsigned codes with `w = (code - zero_point) * scale`, one scale for every
    `group_size` neighbours along in_features (a width that the group does not divide gets a short last group).

    Args:
        bits: bits of a code, 4 or 8.
        group_size: weights that share a scale: a positive multiple of 8, -1 for one group per output channel, None for
            one scale for the whole tensor. On CPU 8 bits are fast per channel (-1), 4 bits for multiples of 32.
        symmetric: no stored zero point, the middle of the grid is zero. False stores an integer zero point per group.
        method: how the codes are chosen; a file of `hf_efficient/methods` ("rtn": round to nearest).
        modules_to_not_convert: globs (see `module_matches`) of modules to leave as they are, in addition to the output
            embedding and what is tied to it.
        overrides: {glob: fields} for mixed precision, e.g. `{"*.mlp.down_proj": {"bits": 8}}`; the first glob that
            matches counts, None leaves the module as it is. Fields not given are those of this config.
        quantize_lm_head: also quantize the output embedding; one that is tied to the input embedding is untied.
        dequantize: when loading an already quantized checkpoint, turn it back into an ordinary model.
        version: of the layout of a saved checkpoint.

    Raises:
        ValueError: any value that is not allowed; names the argument, the value and what is allowed.
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = 64,
        symmetric: bool = False,
        method: str = "rtn",
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        dequantize: bool = False,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        unknown.pop("quant_method", None)
        if version != CONFIG_VERSION:
            raise ValueError(
                f"version={version!r} of a WeightOnlyConfig is not known to this hf_efficient, which reads version "
                f"{CONFIG_VERSION}: the checkpoint was written by another release"
            )
        if unknown:
            raise ValueError(f"WeightOnlyConfig has no argument {sorted(unknown)[0]!r}: allowed are {sorted(_FIELDS)}")
        self.quant_method = "efficient_weight_only"
        self.version = version
        self.bits, self.group_size, self.symmetric, self.method = bits, group_size, symmetric, method
        self.modules_to_not_convert = _checked_patterns(modules_to_not_convert)
        self.overrides = _checked_overrides(overrides)
        self.quantize_lm_head = quantize_lm_head
        self.dequantize = dequantize
        for field in _SCHEME_FIELDS:
            if error := _scheme_error(field, getattr(self, field)):
                raise ValueError(error)
        for field in ("quantize_lm_head", "dequantize"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r} is not supported: it must be True or False")

    def __eq__(self, other) -> bool:
        return type(other) is type(self) and other.to_dict() == self.to_dict() and other.dequantize == self.dequantize

    def for_module(self, name: str) -> "WeightOnlyConfig | None":
        """The config of the module called `name`, with the first matching override applied; None: leave it as it is."""
        for pattern, fields in self.overrides.items():
            if module_matches(pattern, name):
                return None if fields is None else WeightOnlyConfig(**{**self.scheme(), **fields})
        return self

    def scheme(self) -> dict[str, Any]:
        """The fields that describe one weight: bits, group_size, symmetric, method."""
        return {field: getattr(self, field) for field in _SCHEME_FIELDS}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained` may change about an already quantized checkpoint."""
        return {"dequantize": self.dequantize}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `overrides` as a list of pairs, because their order counts and transformers sorts JSON keys.
        Attributes that are not arguments, and `dequantize`, which is not a property of a checkpoint, are left out."""
        saved = {field: getattr(self, field) for field in _FIELDS if field != "dequantize"}
        saved["overrides"] = [[pattern, fields] for pattern, fields in self.overrides.items()]
        return {"quant_method": self.quant_method, **saved}


_FIELDS = (
    *_SCHEME_FIELDS,
    "modules_to_not_convert",
    "overrides",
    "quantize_lm_head",
    "dequantize",
    "version",
)


def _checked_patterns(patterns) -> list[str] | None:
    if patterns is None:
        return None
    if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"modules_to_not_convert={patterns!r} is not supported: it must be a list of module names")
    return list(patterns)


def _checked_overrides(overrides) -> dict[str, dict[str, Any] | None]:
    if overrides is None:
        return {}
    try:
        pairs = dict(overrides).items()
    except (TypeError, ValueError):
        raise ValueError(
            f"overrides={overrides!r} is not supported: it must be a dict of glob -> fields or None"
        ) from None
    checked = {}
    for pattern, fields in pairs:
        if isinstance(fields, WeightOnlyConfig):
            fields = fields.scheme()
        if not isinstance(pattern, str) or not (fields is None or isinstance(fields, dict)):
            raise ValueError(
                f"overrides[{pattern!r}]={fields!r} is not supported: it must be a dict of {list(_SCHEME_FIELDS)}, "
                "a WeightOnlyConfig, or None to leave the module as it is"
            )
        for field, value in (fields or {}).items():
            if error := _scheme_error(field, value):
                raise ValueError(f"overrides[{pattern!r}]: {error}")
        checked[pattern] = None if fields is None else dict(fields)
    return checked
