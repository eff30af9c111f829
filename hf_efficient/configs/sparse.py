"""Weights of which a share is zero."""

from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig, unsupported
from hf_efficient.configs.weight_only import WeightOnlyConfig


ALLOCATIONS = ("uniform", "owl")
WEIGHT_METHODS = ("rtn", "mse", "hqq", "gptq")


class SparseConfig(CompressionConfig):
    """Weights of which a share is zero. Pass it as `quantization_config` to `from_pretrained`.

    Exactly one of `sparsity` and `pattern` is given. 2:4 is stored as values and places (0.54 of 16 bits), everything else as
    values and a bit for each weight.

    Args:
        sparsity: fraction of zeros in every weight, at least 0 and below 1. With `allocation="owl"` the average.
        pattern: "n:m", as "2:4": n kept of every m neighbours along in_features, which m must divide.
        method: how the zeros are chosen; a file of `hf_efficient/pruning`: "magnitude" needs no data, "wanda" and "sparsegpt"
            need `calibration`; see `available_pruning_methods`.
        group: which weights compete where there is no pattern: those of a "row" (every output keeps the same number), of the
            whole "layer", or None for what the method's paper takes.
        allocation: "uniform", the same sparsity for every weight, or "owl", layers with more outliers keep more (not with a
            pattern).
        refine: after each block, tune the kept weights by gradient on the block's outputs, before they become codes.
        weights: a `WeightOnlyConfig` for the kept weights (method "rtn", "mse", "hqq" or "gptq", no codebook): codes instead of
            values. With "gptq" the kept weights take back one another's rounding under the mask: after "sparsegpt" or "alps",
            pruning and quantization work on one output error.
        modules_to_not_convert, overrides, calibration, dequantize, version: as in `WeightOnlyConfig`.
        quantize_lm_head: also prune the output embedding, which must not be tied to the input embedding.

    Raises:
        ValueError: any value that is not allowed, or contradicts another; names the argument, the value and what is allowed.
    """

    name = "efficient_sparse"
    scheme_fields = ("sparsity", "pattern", "method", "group", "allocation", "refine", "weights")

    def __init__(
        self,
        /,
        sparsity: float | None = None,
        pattern: str | None = None,
        method: str = "wanda",
        group: str | None = None,
        allocation: str = "uniform",
        refine: bool = False,
        weights: WeightOnlyConfig | dict[str, Any] | None = None,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        calibration=None,
        dequantize: bool = False,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        given = locals()
        super().__init__(
            self._plain({field: given[field] for field in self.scheme_fields}),
            modules_to_not_convert=modules_to_not_convert,
            overrides=overrides,
            quantize_lm_head=quantize_lm_head,
            calibration=calibration,
            dequantize=dequantize,
            version=version,
            **unknown,
        )
        self.weights = None if self.weights is None else WeightOnlyConfig(**self.weights)
        if self.group is None:  # kept in the checkpoint: how many weights a row has follows from it
            from hf_efficient import pruning

            self.group = "row" if self.pattern else getattr(pruning.get_method(self.method), "GROUP", "row")

    @classmethod
    def scheme_error(cls, scheme):
        return _value_error(scheme) or _contradiction(scheme) or _weights_error(scheme["weights"])

    @classmethod
    def _plain(cls, fields):
        weights = fields.get("weights")
        if not isinstance(weights, WeightOnlyConfig):
            return fields
        if weights != WeightOnlyConfig(**weights.scheme()):
            raise ValueError(f"weights={weights.to_dict()} is not supported: only its fields of a weight may be given")
        return {**fields, "weights": weights.scheme()}

    def scheme(self):
        return self._plain(super().scheme())

    def _merged(self, fields):
        scheme = self.scheme()
        if fields.get("pattern") is not None:  # takes the place of a sparsity, and of what goes with one
            scheme |= {"sparsity": None, "group": None, "allocation": "uniform"}
        if fields.get("sparsity") is not None and self.pattern is not None:
            scheme |= {"pattern": None, "group": None}
        return {**scheme, **fields}

    def target(self):
        """The `Sparsity` of a weight."""
        from hf_efficient.pruning.mask import Sparsity

        if self.pattern is None:
            return Sparsity(self.sparsity, group=self.group)
        return Sparsity.of_pattern(*_parsed(self.pattern))

    def format(self):
        from hf_efficient.formats.bitmap import BitmapFormat
        from hf_efficient.formats.sparse24 import Sparse24Format

        weights = None if self.weights is None else self.weights.format()
        if self.pattern == "2:4":
            return Sparse24Format(weights)
        target = self.target()
        return BitmapFormat(weights, target.sparsity, target.pattern, target.group)

    def method_module(self):
        from hf_efficient import pruning

        return pruning.get_method(self.method)

    def method_name(self):
        return self.method

    def observed(self):
        return super().observed() + (() if self.weights is None else self.weights.observed())

    def needs_calibration(self):
        own = self.refine or self.allocation != "uniform" or self.method_module().NEEDS
        return bool(own or (self.weights is not None and self.weights.needs_calibration()))

    def compress(self, weight, format, inputs=None, transform=None):
        from hf_efficient import pruning

        pruned, mask = pruning.prune(weight, self.method, self.target(), inputs)
        return format.pack(pruned, mask) if self.weights is None else self.quantize_kept(pruned, mask, format, inputs)

    def before_codes(self):
        return type(self)(**{**self.scheme(), "weights": None}) if self.refine and self.weights else self

    def quantize_kept(self, pruned, mask, format, inputs=None):
        """The canonical tensors of `format` for a pruned weight [N, K] and what its mask (bool [N, K]) keeps, as `weights` says."""
        from hf_efficient import methods

        own = self.weights.format()
        tensors = methods.quantize(pruned, own, self.weights.method_name(), inputs, mask=mask)
        codes = own.unpack(tensors["qweight"], pruned.shape[1])
        return format.pack_affine(codes, tensors["scale"], tensors.get("zero_point"), mask)


def available_pruning_methods() -> list[str]:
    """Names of the methods that choose zeros: the files of `hf_efficient/pruning`."""
    from hf_efficient import pruning

    return pruning.available_methods()


def _parsed(pattern: str) -> tuple[int, int] | None:
    """(n, m) of "n:m", or None where it is nothing of the kind."""
    parts = pattern.split(":") if isinstance(pattern, str) else ()
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    n, m = map(int, parts)
    return (n, m) if 0 < n < m else None


def _value_error(scheme) -> str | None:
    """What is wrong with one of the values."""
    from hf_efficient.pruning.mask import GROUPS, sparsity_error

    if (scheme["sparsity"] is None) == (scheme["pattern"] is None):
        given = f"sparsity={scheme['sparsity']!r} and pattern={scheme['pattern']!r}"
        return f"{given} are not supported together: exactly one must be given, as sparsity=0.5 or pattern='2:4'"
    if scheme["sparsity"] is not None and (error := sparsity_error(scheme["sparsity"])):
        return error
    if scheme["pattern"] is not None and _parsed(scheme["pattern"]) is None:
        return unsupported("pattern", scheme["pattern"], "'n:m', as '2:4': n kept of every m neighbours, 0 < n < m")
    if scheme["method"] not in available_pruning_methods():
        return unsupported("method", scheme["method"], f"one of {available_pruning_methods()}")
    for field, allowed in (("group", (*GROUPS, None)), ("allocation", ALLOCATIONS)):
        if scheme[field] not in allowed:
            return unsupported(field, scheme[field], f"one of {allowed}")
    if not isinstance(scheme["refine"], bool):
        return unsupported("refine", scheme["refine"], "True or False")
    return None


def _contradiction(scheme) -> str | None:
    """Which value does not go with another."""
    pattern = scheme["pattern"]
    rules = (
        (pattern and scheme["group"] == "layer", "group", "'row' or None with a pattern"),
        (pattern and scheme["allocation"] != "uniform", "allocation", "'uniform' with a pattern"),
    )
    return next((unsupported(field, scheme[field], allowed) for broken, field, allowed in rules if broken), None)


def _weights_error(weights) -> str | None:
    """What is wrong with the config of the kept weights."""
    if weights is None:
        return None
    if not isinstance(weights, dict):
        return unsupported("weights", weights, "a WeightOnlyConfig, a dict of its arguments, or None")
    try:
        config = WeightOnlyConfig(**weights)
    except ValueError as error:
        return f"weights: {error}"
    if given := sorted(set(weights) - set(WeightOnlyConfig.scheme_fields)):
        return f"weights: {given[0]!r} is not a field of a weight: allowed are {WeightOnlyConfig.scheme_fields}"
    if config.method not in WEIGHT_METHODS:
        return f"weights: {unsupported('method', config.method, f'one of {WEIGHT_METHODS}')}"
    if config.zero_point != "integer":
        return f"weights: {unsupported('zero_point', config.zero_point, repr('integer'))}: zeros are exact"
    fields = ("codebook", "rotate", "refine", "mixed_precision", "int8_on_cpu", "input_scale", "input_order")
    for field in fields:
        if value := getattr(config, field):
            return f"weights: {unsupported(field, value, 'left out: pruned weights are kept on a plain grid')}"
    return None
