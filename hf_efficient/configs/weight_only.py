"""Weights in few bits, activations as they are."""

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig, unsupported


WEIGHT_BITS = (2, 3, 4, 8)
CODEBOOKS = ("nf4", "fp4", "kmeans")
ZERO_POINTS = ("integer", "float", "minimum")
SCALE_DTYPES = ("float16", "bfloat16", "float32")


@functools.cache
def available_methods() -> list[str]:
    """Names of the weight quantization methods: the files of `hf_efficient/methods`."""
    files = pkgutil.iter_modules([str(Path(__file__).parents[1] / "methods")])
    return sorted(module.name for module in files if not module.name.startswith("_"))


class WeightOnlyConfig(CompressionConfig):
    """Weights in few bits, activations as they are. Pass it as `quantization_config` to `from_pretrained`.

    A weight [out_features, in_features] becomes unsigned codes with `w = (code - zero_point) * scale`, one scale for every
    `group_size` neighbours along in_features (a width that the group does not divide gets a short last group); with a
    codebook, `w = codebook[code] * scale`.

    Args:
        bits: bits of a code, 2, 3, 4 or 8. With `mixed_precision` the average.
        group_size: weights that share a scale: a positive multiple of 8, -1 for one group per output channel, None for
            one scale for the whole tensor. On CPU 8 bits are fast per channel (-1), 4 bits for multiples of 32.
        symmetric: no stored zero point, the middle of the grid is zero. False stores an integer zero point per group.
        method: how the codes are chosen; a file of `hf_efficient/methods`: "rtn" (round to nearest), "mse" (clipped for
            the least squared error), "hqq" and "kmeans" need no data, though "mse" and "kmeans" are better with it; "gptq"
            and "awq" need `calibration`.
        codebook: codes are entries of a table instead of points of a grid: "nf4" and "fp4" (4 bits) or "kmeans" (learned).
        double_quantization: store the scales of a codebook in 8 bits, too (QLoRA).
        rotate: spread outliers by random Hadamard rotations (QuIP, QuaRot), undone on the input where they cannot be
            folded into other weights.
        refine: after each block, tune scales and rounding by gradient on the block's outputs.
        mixed_precision: give each layer as many bits as it needs, `bits` on average.
        int8_on_cpu: on CPUs with AVX-512 VNNI, models in bfloat16 compute with inputs rounded to 8 bits, a scale for every 64
            columns of a row: faster prompts and batches, at a small loss (LLM.int8()'s vector-wise scales, finer). Without
            effect elsewhere.
        modules_to_not_convert: globs (see `module_matches`) of modules to leave as they are, in addition to the output
            embedding and what is tied to it.
        overrides: {glob: fields} for other schemes, e.g. `{"*.mlp.down_proj": {"bits": 8}}`; the first glob that
            matches counts, None leaves the module as it is. Fields not given are those of this config.
        quantize_lm_head: also quantize the output embedding; one that is tied to the input embedding is untied.
        calibration: a `CalibrationConfig` (or its arguments as a dict): the text that "gptq", "awq", `refine` and
            `mixed_precision` see.
        dequantize: when loading an already quantized checkpoint, turn it back into an ordinary model.
        input_scale: set by calibration for modules whose input is multiplied by stored factors.
        zero_point: what is stored where the grid is not symmetric: "integer" zero points, "float" ones, which method="hqq" can
            choose, or "minimum", `w = code * scale + minimum`, which as `scale_dtype` and `input_order` is only read from
            checkpoints of other libraries (`hf_efficient.adopt`).
        scale_dtype: "float16", "bfloat16" or "float32" where scales are not stored in the weight's dtype.
        input_order: the columns of the weight are stored in another order, and so are those of the input put.
        version: of the layout of a saved checkpoint.

    Raises:
        ValueError: any value that is not allowed; names the argument, the value and what is allowed.
    """

    name = "efficient_weight_only"
    scheme_fields = (
        *("bits", "group_size", "symmetric", "method", "codebook", "double_quantization"),
        *("rotate", "refine", "mixed_precision", "int8_on_cpu", "input_scale"),
        *("zero_point", "scale_dtype", "input_order"),
    )

    def __init__(
        self,
        /,
        bits: int = 4,
        group_size: int | None = 64,
        symmetric: bool = False,
        method: str = "rtn",
        codebook: str | None = None,
        double_quantization: bool = False,
        rotate: bool = False,
        refine: bool = False,
        mixed_precision: bool = False,
        int8_on_cpu: bool = False,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        calibration=None,
        dequantize: bool = False,
        input_scale: bool = False,
        zero_point: str = "integer",
        scale_dtype: str | None = None,
        input_order: bool = False,
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
        bits, group_size, method = scheme["bits"], scheme["group_size"], scheme["method"]
        if type(bits) is not int or bits not in WEIGHT_BITS:
            return unsupported("bits", bits, f"one of {WEIGHT_BITS}")
        is_group = type(group_size) is int and (group_size == -1 or (group_size > 0 and group_size % 8 == 0))
        if not (group_size is None or is_group):
            allowed = "a positive multiple of 8, -1 (one group per output channel) or None (one scale for the tensor)"
            return unsupported("group_size", group_size, allowed)
        if method not in available_methods():
            return unsupported("method", method, f"one of {available_methods()}")
        booleans = (
            "symmetric",
            "double_quantization",
            "rotate",
            "refine",
            "mixed_precision",
            "int8_on_cpu",
            "input_scale",
            "input_order",
        )
        for field in booleans:
            if not isinstance(scheme[field], bool):
                return unsupported(field, scheme[field], "True or False")
        codebook = scheme["codebook"]
        if codebook is not None and codebook not in CODEBOOKS:
            return unsupported("codebook", codebook, f"one of {CODEBOOKS} or None")
        if codebook in ("nf4", "fp4") and bits != 4:
            return unsupported("bits", bits, f"4 for codebook={codebook!r}")
        if codebook == "kmeans" and bits == 8:
            return unsupported("bits", bits, "2, 3 or 4 for codebook='kmeans'")
        if not {"rtn": True, "gptq": True, "kmeans": codebook == "kmeans"}.get(method, codebook is None):
            return unsupported("method", method, f"one that serves codebook={codebook!r}: rtn or gptq")
        if method == "hqq" and scheme["symmetric"]:
            return unsupported("symmetric", True, "False for method='hqq', which chooses zero points")
        if scheme["zero_point"] not in ZERO_POINTS:
            return unsupported("zero_point", scheme["zero_point"], f"one of {ZERO_POINTS}")
        if scheme["zero_point"] != "integer" and (scheme["symmetric"] or codebook is not None):
            return unsupported("zero_point", scheme["zero_point"], "'integer' where none is stored")
        if scheme["scale_dtype"] not in (*SCALE_DTYPES, None):
            return unsupported("scale_dtype", scheme["scale_dtype"], f"one of {SCALE_DTYPES} or None")
        if scheme["double_quantization"] and codebook is None:
            return unsupported("double_quantization", True, "False where there is no codebook")
        for field in ("refine", "mixed_precision", "int8_on_cpu"):
            if scheme[field] and codebook is not None:
                return unsupported(field, True, f"False for codebook={codebook!r}")
        return None

    def format(self):
        from hf_efficient.formats.affine import AffineFormat

        if self.codebook is None:
            grid = self.bits, self.group_size, self.symmetric, self.int8_on_cpu
            inner = AffineFormat(*grid, self.zero_point, self.scale_dtype)
        else:
            from hf_efficient.formats.codebook import CodebookFormat

            inner = CodebookFormat(
                self.codebook, self.bits, self.group_size, self.double_quantization, self.scale_dtype
            )
        if not (self.input_scale or self.rotate or self.input_order):
            return inner
        from hf_efficient.formats.transformed import TransformedFormat

        return TransformedFormat(inner, self.input_scale, self.rotate, self.input_order)

    def method_name(self):
        return "kmeans" if self.codebook == "kmeans" and self.method == "rtn" else self.method

    def needs_calibration(self):
        method = importlib.import_module(f"hf_efficient.methods.{self.method_name()}")
        uses = self.calibration is not None and getattr(method, "USES", ())
        return bool(self.refine or self.mixed_precision or method.NEEDS or uses)
