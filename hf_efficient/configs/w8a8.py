"""Weights and activations in 8 bits."""

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig
from hf_efficient.configs.checks import check, check_choices, check_flags, is_integer, is_number


DTYPES = ("int8", "fp8", "fp8_e5m2")
METHODS = ("absmax", "zeropoint", "smoothquant", "llm_int8")
OBSERVERS = ("absmax", "percentile", "entropy", "mse")
_THRESHOLD, _PERCENTILE = 6.0, 99.99


class W8A8Config(CompressionConfig):
    """Weights and activations in 8 bits. Pass it as `quantization_config` to `from_pretrained`.

    Args:
        dtype ("int8", "fp8" or "fp8_e5m2"; default "int8"): of the codes; "fp8" is float8 E4M3. "fp8_e5m2": weights in
            E5M2, which has a wider range and half the precision, and inputs in E4M3.
        method (str; default "absmax"): "absmax": symmetric grids. "zeropoint": int8 grids that span the range of
            weights and of activations. "smoothquant" (https://arxiv.org/abs/2211.10438): absmax weights after scales
            have moved outliers from the activations to the weights, by the calibration text; int8 activations span
            their range. "llm_int8" (https://arxiv.org/abs/2208.07339): outlier columns of the activations stay in 16
            bits.
        activations ("dynamic" or "static"; default "dynamic"): "dynamic": one scale per token, fp8 with block weights
            one for 128 columns of a token. "static": one scale, observed on the text of `calibration`.
        weights ("channel", "tensor" or "block"; default "channel"): what shares a scale: an output row, the whole
            weight, or, for fp8, a block of 128 x 128.
        threshold (number > 0; default 6.0): "llm_int8" without `outlier_columns`: a column with a magnitude of at least
            this is an outlier, found anew in every call.
        outlier_columns (int >= 0; default 0): "llm_int8": the outliers are this many columns, those of the largest mean
            square on the calibration text. Their weights stay in 16 bits too, the other int8 activations span their
            range, and a result does not depend on the rest of the batch. fp8 supports "llm_int8" only in this way.
        observer ("absmax", "percentile", "entropy", "mse" or None; default None): chooses the range of static
            activations. None: the best that was measured: "mse" for int8, "absmax" for fp8 and for "smoothquant",
            which moves the outliers into the weights. "entropy" and "mse" are for int8.
        percentile (number above 50, at most 100; default 99.99): "percentile": the percentage of values that is not
            clipped.
        rotate (bool; default False): spread outliers of the inputs by random Hadamard rotations before they are rounded
            (QuaRot, https://arxiv.org/abs/2404.00456).
        modules_to_not_convert (list of str; default None): globs of modules to leave as they are.
        overrides (dict of glob -> fields; default None): other schemes for single modules.
        quantize_lm_head (bool; default False): also quantize the output embedding.
        calibration (`CalibrationConfig` or a dict of its arguments; default None): the text that data-aware methods
            read. None: text that the model writes itself.
        dequantize (bool; default False): turn a quantized checkpoint back into an ordinary model when loading it.
        input_scale (bool; default False): set by calibration for modules whose input is multiplied by stored factors.
        version (int; default 1): layout of a saved checkpoint; only 1 is read.

    Raises:
        ValueError: a value that is not allowed, or that contradicts another; names the argument, the value and what is
            allowed.
    """

    name = "efficient_w8a8"
    scheme_fields = (
        *("dtype", "method", "activations", "weights", "threshold", "outlier_columns"),
        *("observer", "percentile", "rotate", "input_scale"),
    )

    def __init__(
        self,
        /,
        dtype: str = "int8",
        method: str = "absmax",
        activations: str = "dynamic",
        weights: str = "channel",
        threshold: float = _THRESHOLD,
        outlier_columns: int = 0,
        observer: str | None = None,
        percentile: float = _PERCENTILE,
        rotate: bool = False,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict | list | None = None,
        quantize_lm_head: bool = False,
        calibration=None,
        dequantize: bool = False,
        input_scale: bool = False,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        self._initialize(locals())

    @classmethod
    def check_scheme(cls, scheme):
        check_choices(scheme, dtype=DTYPES, method=METHODS, activations=("dynamic", "static"))
        check_choices(scheme, weights=("channel", "tensor", "block"), observer=(*OBSERVERS, None))
        check_flags(scheme, "rotate", "input_scale")
        threshold, percentile, columns = scheme["threshold"], scheme["percentile"], scheme["outlier_columns"]
        check(is_number(threshold) and threshold > 0, "threshold", threshold, "a number above 0")
        is_share = is_number(percentile) and 50 < percentile <= 100
        check(is_share, "percentile", percentile, "a number above 50 and at most 100")
        check(is_integer(columns, 0), "outlier_columns", columns, "an integer, 0 or more")
        _check_combination(scheme)

    def format(self):
        from hf_efficient.formats.transformed import TransformedFormat
        from hf_efficient.formats.w8a8 import Float8Format, Int8Format

        static = self.activations == "static"
        if self.dtype != "int8":
            inner = Float8Format(self.weights, static, self.outlier_columns, self.dtype == "fp8_e5m2")
        else:
            inner = Int8Format(
                per_channel=self.weights == "channel",
                zero_point=self.method == "zeropoint",
                asymmetric=self.method in ("zeropoint", "smoothquant") or self.outlier_columns > 0,
                static=static,
                outlier_threshold=self.threshold if self.method == "llm_int8" and not self.outlier_columns else None,
                outlier_columns=self.outlier_columns,
            )
        if not (self.input_scale or self.rotate):
            return inner
        return TransformedFormat(inner, self.input_scale, self.rotate)

    def method_name(self):
        return "_w8a8_weights"

    def needs_calibration(self):
        return self.method == "smoothquant" or self.activations == "static" or self.outlier_columns > 0


def _check_combination(scheme) -> None:
    """Raises ValueError for a value that does not go with another."""
    is_fp8, static, by_block = (
        scheme["dtype"] != "int8",
        scheme["activations"] == "static",
        scheme["weights"] == "block",
    )
    method, observer, columns = scheme["method"], scheme["observer"], scheme["outlier_columns"]
    is_llm, fp8 = method == "llm_int8", f"dtype={scheme['dtype']!r}"
    rules = (  # (whether it is broken, the argument to name, what it must be)
        (
            is_fp8 and (method == "zeropoint" or (is_llm and not columns)),
            "method",
            "'absmax', 'smoothquant' or, with outlier_columns, 'llm_int8' for " + fp8,
        ),
        (is_llm and by_block, "weights", "'channel' or 'tensor' for method='llm_int8'"),
        (not is_fp8 and by_block, "weights", "'channel' or 'tensor' for dtype='int8'"),
        (static and by_block, "activations", "'dynamic' for weights='block'"),
        (static and is_llm, "activations", "'dynamic' for method='llm_int8'"),
        (observer is not None and not static, "observer", "None for activations='dynamic'"),
        (is_fp8 and observer in ("entropy", "mse"), "observer", "'absmax' or 'percentile' for " + fp8),
        (
            scheme["percentile"] != _PERCENTILE and observer != "percentile",
            "percentile",
            f"{_PERCENTILE} (the default) unless observer='percentile'",
        ),
        (columns and not is_llm, "outlier_columns", f"0 for method={method!r}"),
        (
            scheme["threshold"] != _THRESHOLD and (not is_llm or columns),
            "threshold",
            f"{_THRESHOLD} (the default) unless method='llm_int8' finds outliers by it",
        ),
        (scheme["rotate"] and is_llm, "rotate", "False for method='llm_int8', which needs outliers in single columns"),
    )
    for is_broken, argument, allowed in rules:
        check(not is_broken, argument, scheme[argument], allowed)
