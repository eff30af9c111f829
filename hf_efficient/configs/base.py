"""What all compression configs share: the modules they apply to, the scheme of a weight, and the round trip through
JSON."""

import fnmatch
import inspect
import re
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.configs.checks import check, check_flags, naming


CONFIG_VERSION = 1
_SHARED = ("modules_to_not_convert", "overrides", "quantize_lm_head", "dequantize", "calibration", "version")


def module_matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module `name` or a module that contains it.

    A pattern is a glob over whole dotted parts, anywhere in the name; `*` also crosses dots. Examples: `k_proj`,
    `layers.0` (not layer 10), `vision_tower` (also as `model.vision_tower`), `layers.*.mlp.down_proj`, `*.self_attn.*`.
    """
    inner = re.sub(r"\\[zZ]$", "", fnmatch.translate(pattern))
    return re.search(rf"(?:^|\.)(?:{inner})(?:\.|$)", name) is not None


class CompressionConfig(QuantizationConfigMixin):
    """Base of the configs that `from_pretrained(quantization_config=...)` takes.

    The *scheme* is the fields that describe one weight. Overrides may set them for single modules. A subclass names
    them (`scheme_fields`), checks them (`check_scheme`), and says which format they mean (`format`), which method
    chooses the codes (`method_name`) and whether that method needs text (`needs_calibration`).

    Args that every subclass takes, besides its scheme:
        modules_to_not_convert (list of str; default None): globs (see `module_matches`) of modules to leave as they
            are, in addition to the output embedding and the modules tied to it.
        overrides (dict of glob -> fields; default None): other schemes for single modules, for example
            `{"*.mlp.down_proj": {"bits": 8}}`. The first glob that matches counts. Fields not given are those of this
            config; None in place of the fields leaves the module as it is.
        quantize_lm_head (bool; default False): also compress the output embedding.
        calibration (`CalibrationConfig` or a dict of its arguments; default None): the text that data-aware methods
            see.
        dequantize (bool; default False): turn a compressed checkpoint back into an ordinary model when loading it.
        version (int; default 1): layout of a saved checkpoint; only 1 is read.
    """

    name: ClassVar[str]  # the `quant_method` of a checkpoint
    scheme_fields: ClassVar[tuple[str, ...]]
    tunes_models: ClassVar[bool] = False  # whether `CalibrationConfig(minutes=...)` is served

    def _initialize(self, arguments: dict[str, Any]) -> None:
        """Checks and sets the arguments of a subclass: the `locals()` of its `__init__`, the others under "unknown".

        Raises:
            ValueError: an argument that the class does not have, or a value that is not allowed.
        """
        kind = type(self).__name__
        own = {name: value for name, value in arguments.items() if name not in ("self", "unknown")}
        given = {**dict.fromkeys(_SHARED), **arguments["unknown"], **own}
        given.pop("quant_method", None)
        if given["version"] != CONFIG_VERSION:
            raise ValueError(
                f"version={given['version']!r} of a {kind} is not known to this hf_efficient, which reads version "
                f"{CONFIG_VERSION}: the checkpoint was written by another release"
            )
        if unknown := sorted(set(given) - set(self._fields())):
            raise ValueError(f"{kind} has no argument {unknown[0]!r}: allowed are {sorted(self._fields())}")
        scheme = self._plain({field: given[field] for field in self.scheme_fields})
        self.check_scheme(scheme)
        check_flags(given, "quantize_lm_head", "dequantize")
        self.quant_method = self.name
        for field, value in (given | scheme).items():
            setattr(self, field, value)
        self.modules_to_not_convert = _checked_patterns(self.modules_to_not_convert)
        self.overrides = self._checked_overrides(self.overrides)
        self.calibration = _checked_calibration(self.calibration)
        if self.calibration is not None and self.calibration.minutes is not None:
            refines = [self.scheme(), *filter(None, self.overrides.values())] if self.tunes_models else []
            allowed = "None where nothing has refine=True" if self.tunes_models else f"None in a {kind}"
            check(any(own.get("refine") for own in refines), "minutes", self.calibration.minutes, allowed)

    @classmethod
    def check_scheme(cls, scheme: dict[str, Any]) -> None:
        """Raises ValueError for a scheme that is not allowed ("bits=5 is not supported: it must be ...")."""
        raise NotImplementedError

    def format(self):
        """The `Format` of the weights that this config describes."""
        raise NotImplementedError

    def method_name(self) -> str:
        """Name of the file that chooses codes, scales and zero points (or, in `SparseConfig`, the zeros)."""
        raise NotImplementedError

    def method_module(self):
        """The module `method_name()`, imported: of `hf_efficient/methods` unless a subclass says otherwise."""
        from hf_efficient import methods

        return methods.get_method(self.method_name())

    def observed(self) -> tuple[str, ...]:
        """Names of the `LinearInputs` attributes that the method reads."""
        method = self.method_module()
        return (*method.NEEDS, *getattr(method, "USES", ()))

    def compress(self, weight, format, inputs=None, transform=None) -> dict[str, Any]:
        """The canonical tensors of weight [N, K] in `format`, which calibration may have changed; see
        `hf_efficient.methods.quantize` for the arguments and errors."""
        from hf_efficient import methods

        return methods.quantize(weight, format, self.method_name(), inputs, transform)

    def check_method(self) -> None:
        """Raises ValueError where the method cannot choose the codes of the format."""
        from hf_efficient import methods

        methods.check_serves(self.method_name(), self.format().expert(0))

    def before_codes(self) -> "CompressionConfig":
        """The config under which a weight is refined; another one than this where codes are chosen only afterwards."""
        return self

    def needs_calibration(self) -> bool:
        """Whether activations must be observed. If not, each weight is compressed as it is loaded."""
        raise NotImplementedError

    def __eq__(self, other) -> bool:
        return type(other) is type(self) and other.to_dict() == self.to_dict() and other.dequantize == self.dequantize

    def for_module(self, name: str) -> "CompressionConfig | None":
        """The config of the module `name`: this one with the first matching override applied, or None to leave the
        module as it is."""
        for pattern, fields in self.overrides.items():
            if module_matches(pattern, name):
                if fields is None:
                    return None
                own = type(self)(**self._merged(fields))
                own.calibration = self.calibration  # checked with the whole config
                return own
        return self

    def scheme(self) -> dict[str, Any]:
        """The fields that describe one weight."""
        return self._plain({field: getattr(self, field) for field in self.scheme_fields})

    def check_attributes(self) -> None:
        """Raises ValueError where an attribute was set to a value that the argument of its name does not take."""
        type(self)(**{field: getattr(self, field) for field in self._fields()})

    def get(self, name: str, default=None) -> Any:
        """The attribute `name`, as of a dict, for which transformers takes that of a config given to
        `from_pretrained(config=...)`, such as a loaded model's."""
        return getattr(self, name, default)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained` may change about an already quantized checkpoint."""
        return {"dequantize": self.dequantize}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `overrides` becomes a list of pairs, because their order counts and transformers sorts JSON keys.
        Left out: attributes that are not arguments, and `dequantize`, which is not a property of a checkpoint."""
        saved = {field: getattr(self, field) for field in self._fields() if field != "dequantize"} | self.scheme()
        saved["overrides"] = [[pattern, fields] for pattern, fields in self.overrides.items()]
        saved["calibration"] = None if self.calibration is None else self.calibration.to_dict()
        return {"quant_method": self.quant_method, **saved}

    def settled(self, can_run: bool) -> "CompressionConfig":
        """The config with which a model is loaded. can_run: the model can be run on tokens of its own."""
        return self

    @property
    def asked_calibration(self) -> CalibrationConfig | None:
        """`calibration`, None where it was left out."""
        return self.calibration

    def plain(self) -> dict[str, Any]:
        """Argument -> its value where it is left out. What differs from it describes the config."""
        return {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return (*cls.scheme_fields, *_SHARED)

    def _checked_overrides(self, overrides) -> dict[str, dict[str, Any] | None]:
        try:
            pairs = dict({} if overrides is None else overrides).items()
        except (TypeError, ValueError):
            check(False, "overrides", overrides, "a dict of glob -> fields or None")
        checked = {}
        for pattern, fields in pairs:
            label, kind = f"overrides[{pattern!r}]", type(self)
            fields = fields.scheme() if type(fields) is kind else fields
            allowed = f"a dict of {list(self.scheme_fields)}, a {kind.__name__}, or None to leave the module as it is"
            check(isinstance(pattern, str) and (fields is None or isinstance(fields, dict)), label, fields, allowed)
            if fields is not None:
                fields = dict(self._plain(fields))
                if unknown := [field for field in fields if field not in self.scheme_fields]:
                    allowed = f"allowed are {list(self.scheme_fields)}"
                    raise ValueError(f"{label}: {unknown[0]!r} is not a field that an override can set: {allowed}")
                with naming(label):
                    self.check_scheme(self._merged(fields))
            checked[pattern] = fields
        return checked

    @classmethod
    def _plain(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a scheme as JSON holds them."""
        return fields

    def _merged(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The scheme of this config with the fields of an override."""
        return {**self.scheme(), **fields}


def _checked_patterns(patterns) -> list[str] | None:
    if patterns is None:
        return None
    is_list = isinstance(patterns, (list, tuple, set, frozenset))
    are_names = is_list and all(isinstance(name, str) and name for name in patterns)
    check(are_names, "modules_to_not_convert", patterns, "a list of module names")
    return list(patterns)


def _checked_calibration(calibration) -> CalibrationConfig | None:
    if isinstance(calibration, dict):
        return CalibrationConfig(**calibration)
    is_config = calibration is None or isinstance(calibration, CalibrationConfig)
    check(is_config, "calibration", calibration, "a CalibrationConfig, a dict of its arguments, or None")
    return calibration
