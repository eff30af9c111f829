"""Weights and activations in 8 bits."""

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig, unsupported


DTYPES = ("int8", "fp8")
METHODS = ("absmax", "zeropoint", "smoothquant", "llm_int8")
OBSERVERS = ("absmax", "percentile", "entropy", "mse")
_THRESHOLD, _PERCENTILE = 6.0, 99.99


class W8A8Config(CompressionConfig):
    """Weights and activations in 8 bits. Pass it as `quantization_config` to `from_pretrained`.

    Args:
        dtype: "int8", or "fp8" (float8 E4M3).
        method: "absmax" (symmetric grids), "zeropoint" (int8 grids that span the range of weights and of activations),
            "smoothquant" (absmax weights after scales between channels of activations and weights, which need
            `calibration`; int8 activations span their range) or "llm_int8" (outlier columns of the activations stay in 16
            bits).
        activations: "dynamic" (one scale a token, fp8 with block weights one for 128 columns of a token) or "static" (one
            scale, seen by `observer` on the text of `calibration`).
        weights: one scale a "channel" (vector-wise), a "tensor" or, for fp8, a "block" of 128 x 128.
        threshold: of llm_int8: columns with a magnitude of this or more are outliers (found anew in every call).
        outlier_columns: of llm_int8: this many columns, of the largest mean square on the text of `calibration`, are the
            outliers instead. Their weights are kept in 16 bits, too, the other int8 activations span their range, and a
            result does not depend on what else is in the batch. The only way of llm_int8 for fp8.
        observer: of static activations: "absmax" (the default), "percentile", or for int8 "entropy" or "mse".
        percentile: of that observer, the percentage of the values that are not clipped.
        rotate: spread outliers by random Hadamard rotations of the inputs (QuaRot) before they are rounded.
        modules_to_not_convert, overrides, quantize_lm_head, calibration, dequantize, version: as in `WeightOnlyConfig`.
        input_scale: set by calibration for modules whose input is multiplied by stored factors.

    Raises:
        ValueError: any value that is not allowed, or contradicts another; names the argument, the value and what is allowed.
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
        given = locals()
        super().__init__(
            {field: given[field] for field in self.scheme_fields},
            modules_to_not_convert=modules_to_not_convert,
            overrides=overrides,
            quantize_lm_head=quantize_lm_head,
            calibration=calibration,
            dequantize=dequantize,
            version=version,
            **unknown,
        )

    @classmethod
    def scheme_error(cls, scheme):
        return _value_error(scheme) or _contradiction(scheme)

    def format(self):
        from hf_efficient.formats.transformed import TransformedFormat
        from hf_efficient.formats.w8a8 import Float8Format, Int8Format

        static = self.activations == "static"
        if self.dtype == "fp8":
            inner = Float8Format(self.weights, static, self.outlier_columns)
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
        return "_w8a8"

    def needs_calibration(self):
        return self.method == "smoothquant" or self.activations == "static" or self.outlier_columns > 0


def _value_error(scheme) -> str | None:
    """What is wrong with one of the values."""
    choices = {
        "dtype": DTYPES,
        "method": METHODS,
        "activations": ("dynamic", "static"),
        "weights": ("channel", "tensor", "block"),
        "observer": (*OBSERVERS, None),
    }
    for field, allowed in choices.items():
        if scheme[field] not in allowed:
            return unsupported(field, scheme[field], f"one of {allowed}")
    for field in ("rotate", "input_scale"):
        if not isinstance(scheme[field], bool):
            return unsupported(field, scheme[field], "True or False")
    for field, low, high in (("threshold", 0, float("inf")), ("percentile", 50, 100)):
        value = scheme[field]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            return unsupported(field, value, f"a number above {low}" + (" and at most 100" if high == 100 else ""))
    columns = scheme["outlier_columns"]
    if type(columns) is not int or columns < 0:
        return unsupported("outlier_columns", columns, "an integer, 0 or more")
    return None


def _contradiction(scheme) -> str | None:
    """Which value does not go with another."""
    dtype, method, static = scheme["dtype"], scheme["method"], scheme["activations"] == "static"
    is_llm, observer = method == "llm_int8", scheme["observer"]
    rules = (
        (
            dtype == "fp8" and (method == "zeropoint" or (is_llm and not scheme["outlier_columns"])),
            "method",
            "'absmax', 'smoothquant' or, with outlier_columns, 'llm_int8' for dtype='fp8'",
        ),
        (is_llm and scheme["weights"] == "block", "weights", "'channel' or 'tensor' for method='llm_int8'"),
        (dtype == "int8" and scheme["weights"] == "block", "weights", "'channel' or 'tensor' for dtype='int8'"),
        (static and scheme["weights"] == "block", "activations", "'dynamic' for weights='block'"),
        (static and is_llm, "activations", "'dynamic' for method='llm_int8'"),
        (observer is not None and not static, "observer", "None for activations='dynamic'"),
        (dtype == "fp8" and observer in ("entropy", "mse"), "observer", "'absmax' or 'percentile' for dtype='fp8'"),
        (
            scheme["percentile"] != _PERCENTILE and observer != "percentile",
            "percentile",
            f"{_PERCENTILE} (the default) unless observer='percentile'",
        ),
        (scheme["outlier_columns"] and not is_llm, "outlier_columns", f"0 for method={method!r}"),
        (
            scheme["threshold"] != _THRESHOLD and (not is_llm or scheme["outlier_columns"]),
            "threshold",
            f"{_THRESHOLD} (the default) unless method='llm_int8' finds outliers by it",
        ),
        (scheme["rotate"] and is_llm, "rotate", "False for method='llm_int8', which needs outliers in single columns"),
    )
    return next((unsupported(field, scheme[field], allowed) for broken, field, allowed in rules if broken), None)
