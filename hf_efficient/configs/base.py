"""What all compression configs share: which modules, with which scheme, and the round trip through JSON."""

import fnmatch
import inspect
import re
from collections.abc import Iterable, Sized
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin


CONFIG_VERSION = 1


def module_matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module `name` or one that contains it.

    A pattern is a glob (`*` also crosses dots) over whole dotted parts, anywhere in the name: `k_proj`, `layers.0` (not
    layer 10), `vision_tower` (also as `model.vision_tower`), `layers.*.mlp.down_proj`, `*.self_attn.*`.
    """
    inner = re.sub(r"\\[zZ]$", "", fnmatch.translate(pattern))
    return re.search(rf"(?:^|\.)(?:{inner})(?:\.|$)", name) is not None


class CompressionConfig(QuantizationConfigMixin):
    """Base of the configs that `from_pretrained(quantization_config=...)` takes. A subclass names its scheme (the fields
    that describe one weight, which overrides may set for some modules), says what is wrong with a scheme
    (`scheme_error`), which format it is (`format`), which method chooses its numbers (`method_name`) and whether those
    need text (`needs_calibration`)."""

    name: ClassVar[str]  # the `quant_method` of a checkpoint
    scheme_fields: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        scheme: dict[str, Any],
        /,
        *,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        dequantize: bool = False,
        calibration=None,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        kind = type(self).__name__
        unknown.pop("quant_method", None)
        if version != CONFIG_VERSION:
            raise ValueError(
                f"version={version!r} of a {kind} is not known to this hf_efficient, which reads version "
                f"{CONFIG_VERSION}: the checkpoint was written by another release"
            )
        if unknown:
            raise ValueError(f"{kind} has no argument {sorted(unknown)[0]!r}: allowed are {sorted(self._fields())}")
        self.quant_method = self.name
        self.version = version
        for field, value in scheme.items():
            setattr(self, field, value)
        if error := self.scheme_error(scheme):
            raise ValueError(error)
        self.modules_to_not_convert = _checked_patterns(modules_to_not_convert)
        self.overrides = self._checked_overrides(overrides)
        self.quantize_lm_head = quantize_lm_head
        self.dequantize = dequantize
        for field in ("quantize_lm_head", "dequantize"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r} is not supported: it must be True or False")
        self.calibration = _checked_calibration(calibration)

    @classmethod
    def scheme_error(cls, scheme: dict[str, Any]) -> str | None:
        """What is wrong with the fields of a scheme ("bits=5 is not supported: it must be ..."), or None."""
        raise NotImplementedError

    def format(self):
        """The `Format` of the weights that this config describes."""
        raise NotImplementedError

    def method_name(self) -> str:
        """The file that chooses the numbers."""
        raise NotImplementedError

    def method_module(self):
        """That file, imported: of `hf_efficient/methods` unless a subclass says otherwise."""
        from hf_efficient import methods

        return methods.get_method(self.method_name())

    def observed(self) -> tuple[str, ...]:
        """What the method is told of the inputs: names of `LinearInputs` attributes."""
        method = self.method_module()
        return (*method.NEEDS, *getattr(method, "USES", ()))

    def compress(self, weight, format, inputs=None, transform=None) -> dict[str, Any]:
        """The canonical tensors of weight [N, K] in `format`, which calibration may have changed; see
        `hf_efficient.methods.quantize` for the arguments and errors."""
        from hf_efficient import methods

        return methods.quantize(weight, format, self.method_name(), inputs, transform)

    def before_codes(self) -> "CompressionConfig":
        """The config of what `refine` tunes where that becomes codes only afterwards; by default this one."""
        return self

    def needs_calibration(self) -> bool:
        """Whether activations must be seen; a weight is compressed as it arrives otherwise."""
        raise NotImplementedError

    def __eq__(self, other) -> bool:
        return type(other) is type(self) and other.to_dict() == self.to_dict() and other.dequantize == self.dequantize

    def for_module(self, name: str) -> "CompressionConfig | None":
        """The config of the module called `name`, with the first matching override applied; None: leave it as it is."""
        for pattern, fields in self.overrides.items():
            if module_matches(pattern, name):
                if fields is None:
                    return None
                return type(self)(**self._merged(fields), calibration=self.calibration)
        return self

    def scheme(self) -> dict[str, Any]:
        """The fields that describe one weight."""
        return {field: getattr(self, field) for field in self.scheme_fields}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained` may change about an already quantized checkpoint."""
        return {"dequantize": self.dequantize}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `overrides` as a list of pairs, because their order counts and transformers sorts JSON keys.
        Attributes that are not arguments, and `dequantize`, which is not a property of a checkpoint, are left out."""
        saved = {field: getattr(self, field) for field in self._fields() if field != "dequantize"} | self.scheme()
        saved["overrides"] = [[pattern, fields] for pattern, fields in self.overrides.items()]
        saved["calibration"] = None if self.calibration is None else self.calibration.to_dict()
        return {"quant_method": self.quant_method, **saved}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Argument -> its default."""
        return {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        own = ("modules_to_not_convert", "overrides", "quantize_lm_head", "dequantize", "calibration", "version")
        return (*cls.scheme_fields, *own)

    def _checked_overrides(self, overrides) -> dict[str, dict[str, Any] | None]:
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
            if type(fields) is type(self):
                fields = fields.scheme()
            if not isinstance(pattern, str) or not (fields is None or isinstance(fields, dict)):
                raise ValueError(
                    f"overrides[{pattern!r}]={fields!r} is not supported: it must be a dict of {list(self.scheme_fields)}, "
                    f"a {type(self).__name__}, or None to leave the module as it is"
                )
            fields = fields if fields is None else self._plain(fields)
            for field in fields or {}:
                if field not in self.scheme_fields:
                    raise ValueError(
                        f"overrides[{pattern!r}]: {field!r} is not a field that an override can set: allowed are "
                        f"{list(self.scheme_fields)}"
                    )
            if fields is not None and (error := self.scheme_error(self._merged(fields))):
                raise ValueError(f"overrides[{pattern!r}]: {error}")
            checked[pattern] = None if fields is None else dict(fields)
        return checked

    @classmethod
    def _plain(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a scheme as JSON holds them."""
        return fields

    def _merged(self, fields: dict[str, Any]) -> dict[str, Any]:
        """This config's scheme with some fields of an override."""
        return {**self.scheme(), **fields}


def unsupported(field: str, value: Any, allowed: str) -> str:
    """The message for a value that is not allowed."""
    return f"{field}={value!r} is not supported: it must be {allowed}"


def is_collection(value: Any) -> bool:
    """Whether `value` holds items that can be counted and looked at twice, and is no string."""
    return isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, str)


def _checked_patterns(patterns) -> list[str] | None:
    if patterns is None:
        return None
    is_list = isinstance(patterns, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) and name for name in patterns):
        raise ValueError(f"modules_to_not_convert={patterns!r} is not supported: it must be a list of module names")
    return list(patterns)


def _checked_calibration(calibration):
    if calibration is None:
        return None
    from hf_efficient.configs.calibration import CalibrationConfig

    if isinstance(calibration, CalibrationConfig):
        return calibration
    if isinstance(calibration, dict):
        return CalibrationConfig(**calibration)
    raise ValueError(unsupported("calibration", calibration, "a CalibrationConfig, a dict of its arguments, or None"))
