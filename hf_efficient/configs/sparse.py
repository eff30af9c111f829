"""Weights of which a share is zero."""

from dataclasses import replace
from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig
from hf_efficient.configs.checks import check, check_choices, check_flags, naming
from hf_efficient.configs.weight_only import WeightOnlyConfig


ALLOCATIONS = ("uniform", "owl")
WEIGHT_METHODS = ("rtn", "mse", "hqq", "gptq")


class SparseConfig(CompressionConfig):
    """Prunes weights: sets a share of them to zero. Pass it as `quantization_config` to `from_pretrained`.

    Exactly one of `sparsity` and `pattern` is given. 2:4 is stored as values and positions (0.54 of 16 bits),
    everything else as values and one bit for each weight.

    Args:
        sparsity (number in [0, 1); default None): fraction of zeros in every weight. With `allocation="owl"` the
        average.
        pattern ("n:m", as "2:4"; default None): n kept of every m neighbours along in_features, which m must divide.
        method (str; default "wanda"): how the zeros are chosen; a file of `hf_efficient/pruning`, see
            `available_pruning_methods`. "magnitude" needs no data. The others read a calibration text, for example
            "wanda" (https://arxiv.org/abs/2306.11695), "sparsegpt" (https://arxiv.org/abs/2301.00774) and "alps"
            (https://arxiv.org/abs/2406.07831).
        group ("row", "layer" or None; default None): which weights compete where there is no pattern: those of a row
            (every output keeps the same number) or of the whole layer. None: as in the method's paper.
        allocation ("uniform" or "owl"; default "uniform"): "owl" (https://arxiv.org/abs/2310.05175): layers with more
            outliers keep more, by a calibration text; not with `pattern`.
        refine (bool; default False): after each block, tune the kept weights by gradient on the block's outputs, before
            they become codes.
        weights (`WeightOnlyConfig` or a dict of its arguments; default None): the kept weights are stored as codes
            instead of values (method "rtn", "mse", "hqq" or "gptq", no codebook). With "gptq" the kept weights
            compensate each other's rounding errors under the mask, so after "sparsegpt" or "alps" both steps lower the
            same output error.
        modules_to_not_convert (list of str; default None): globs of modules to leave as they are.
        overrides (dict of glob -> fields; default None): other schemes for single modules.
        quantize_lm_head (bool; default False): also prune the output embedding, which must not be tied to the input
            one.
        calibration (`CalibrationConfig` or a dict of its arguments; default None): the text that data-aware methods
            read. None: text that the model writes itself.
        dequantize (bool; default False): turn a pruned checkpoint back into an ordinary model when loading it.
        version (int; default 1): layout of a saved checkpoint; only 1 is read.

    Raises:
        ValueError: a value that is not allowed, or that contradicts another; names the argument, the value and what is
            allowed.
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
        self._initialize(locals())
        self.weights = None if self.weights is None else _kept_weights(self.weights)
        if self.group is None:  # saved in the checkpoint, because the number of weights of a row follows from it
            self.group = "row" if self.pattern else getattr(self.method_module(), "GROUP", "row")

    @classmethod
    def check_scheme(cls, scheme):
        from hf_efficient.pruning.mask import GROUPS, check_sparsity

        sparsity, pattern = scheme["sparsity"], scheme["pattern"]
        if (sparsity is None) == (pattern is None):
            given = f"sparsity={sparsity!r} and pattern={pattern!r} are not supported together"
            raise ValueError(f"{given}: exactly one must be given, as sparsity=0.5 or pattern='2:4'")
        if sparsity is not None:
            check_sparsity(sparsity)
        is_pattern = pattern is None or _parsed(pattern) is not None
        check(is_pattern, "pattern", pattern, "'n:m', as '2:4': n kept of every m neighbours, 0 < n < m")
        check_choices(scheme, method=available_pruning_methods(), group=(*GROUPS, None), allocation=ALLOCATIONS)
        check_flags(scheme, "refine")
        if pattern:
            check(scheme["group"] != "layer", "group", scheme["group"], "'row' or None with a pattern")
            check(scheme["allocation"] == "uniform", "allocation", scheme["allocation"], "'uniform' with a pattern")
        if scheme["weights"] is not None:
            _check_weights(scheme["weights"])

    @classmethod
    def _plain(cls, fields):
        weights = fields.get("weights")
        if not isinstance(weights, WeightOnlyConfig):
            return fields
        if weights != WeightOnlyConfig(**weights.scheme()):
            raise ValueError(f"weights={weights.to_dict()} is not supported: only its fields of a weight may be given")
        return {**fields, "weights": weights.scheme()}

    def _merged(self, fields):
        scheme = self.scheme()
        if fields.get("pattern") is not None:  # replaces the sparsity and what only goes with a sparsity
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

        weights = self._kept_format()
        if self.pattern == "2:4":
            return Sparse24Format(weights)
        target = self.target()
        return BitmapFormat(weights, target.sparsity, target.pattern, target.group)

    def _kept_format(self):
        """The format of the kept weights, whose kernels take inputs as they are; None for values."""
        return None if self.weights is None else replace(self.weights.format(), int8_on_cpu=False)

    def method_module(self):
        from hf_efficient import pruning

        return pruning.get_method(self.method)

    def method_name(self):
        return self.method

    def check_method(self):
        if self.weights is not None:
            self.weights.check_method()

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
        """The canonical tensors of `format` for a pruned weight [N, K] and its mask (bool [N, K], True = kept): the
        kept weights quantized as `weights` says."""
        from hf_efficient import methods

        own = self._kept_format()
        tensors = methods.quantize(pruned, own, self.weights.method_name(), inputs, mask=mask)
        codes = own.unpack(tensors["qweight"], pruned.shape[1])
        return format.pack_affine(codes, tensors["scale"], tensors.get("zero_point"), mask)


def available_pruning_methods() -> list[str]:
    """Names of the methods that choose zeros: the files of `hf_efficient/pruning`."""
    from hf_efficient import pruning

    return pruning.available_methods()


def _parsed(pattern: str) -> tuple[int, int] | None:
    """(n, m) of "n:m", or None for anything else."""
    parts = pattern.split(":") if isinstance(pattern, str) else ()
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return None
    n, m = map(int, parts)
    return (n, m) if 0 < n < m else None


def _kept_weights(arguments: dict[str, Any]) -> WeightOnlyConfig:
    """The config of the weights that are kept: rounded to nearest unless it names a method."""
    return WeightOnlyConfig(**{"method": "rtn", **arguments})


def _check_weights(weights) -> None:
    """Raises ValueError unless `weights` is a scheme (a dict) that kept weights can be stored in."""
    check(isinstance(weights, dict), "weights", weights, "a WeightOnlyConfig, a dict of its arguments, or None")
    with naming("weights"):
        config = _kept_weights(weights)
        if given := sorted(set(weights) - set(WeightOnlyConfig.scheme_fields)):
            allowed = WeightOnlyConfig.scheme_fields
            raise ValueError(f"{given[0]!r} is not a field of a weight: allowed are {allowed}")
        check_choices(vars(config), method=WEIGHT_METHODS)
        check(config.zero_point == "integer", "zero_point", config.zero_point, "'integer': zeros are exact")
        plain = ("codebook", "rotate", "refine", "mixed_precision", "input_scale", "input_order")
        for field in ("activation_bits", *plain):
            value = getattr(config, field)
            check(not value, field, value, "left out: pruned weights are kept on a plain grid")
        rounds = config.int8_on_cpu
        check(rounds is not True, "int8_on_cpu", rounds, "'auto' or False: kernels of pruned weights round no inputs")
