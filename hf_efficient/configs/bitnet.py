"""Ternary weights with inputs of 8 bits: BitNet b1.58."""

from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig, unsupported


SOURCE_FIELDS = {
    "linear_class": "bitlinear",
    "quantization_mode": "offline",
    "use_rms_norm": False,
    "rms_norm_eps": 1e-6,
}


class BitNetConfig(CompressionConfig):
    """Weights -1, 0 and 1 times a scale, inputs rounded to 8 bits a token (https://arxiv.org/abs/2402.17764). Pass it as
    `quantization_config` to `from_pretrained`: of an ordinary checkpoint (one that was trained for it, as with
    `hf_efficient.bit_linear.BitLinear`; others become useless) it ternarises each weight by its mean magnitude, a checkpoint of
    transformers' `BitNetQuantConfig` it reads as it is.

    Args:
        per_channel: one scale a row instead of the paper's one a weight.
        dense: keep five weights in a byte (1.6 bits) instead of four (2 bits) on disk.
        rms_norm_eps: each ternary layer normalises its input first, by a child `rms_norm` with this epsilon (None: it does
            not), as `hf_efficient.bit_linear.BitLinear(rms_norm=True)` does.
        modules_to_not_convert, overrides, quantize_lm_head, dequantize, version: as in `WeightOnlyConfig`.

    Raises:
        ValueError: any value that is not allowed; names the argument, the value and what is allowed.
    """

    name = "efficient_bitnet"
    scheme_fields = ("per_channel", "dense")
    source: dict[str, Any] | None = None  # SOURCE_FIELDS of a checkpoint of transformers that is being read

    def __init__(
        self,
        /,
        per_channel: bool = False,
        dense: bool = False,
        rms_norm_eps: float | None = None,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        dequantize: bool = False,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        if unknown.get("calibration") is not None:
            raise ValueError(unsupported("calibration", unknown["calibration"], "None: ternarising needs no data"))
        if rms_norm_eps is not None and not (isinstance(rms_norm_eps, float) and rms_norm_eps > 0):
            raise ValueError(unsupported("rms_norm_eps", rms_norm_eps, "None or a positive float"))
        self.rms_norm_eps = rms_norm_eps
        super().__init__(
            {"per_channel": per_channel, "dense": dense},
            modules_to_not_convert=modules_to_not_convert,
            overrides=overrides,
            quantize_lm_head=quantize_lm_head,
            dequantize=dequantize,
            version=version,
            **unknown,
        )

    @classmethod
    def of_checkpoint(cls, saved: dict[str, Any], asked: "BitNetConfig | None" = None) -> "BitNetConfig":
        """For reading a checkpoint whose config.json holds `saved`, the dict of a `BitNetQuantConfig`: `asked` (or the default)
        with the modules that the checkpoint left as they are, its norms, and `source` set.

        Raises:
            ValueError: `saved` is of another method, or `asked` wants one scale a row, which the checkpoint lacks."""
        asked = asked or cls()
        if saved.get("quant_method") != "bitnet":
            raise ValueError(f"quant_method={saved.get('quant_method')!r} of the checkpoint is not 'bitnet'")
        if asked.per_channel:
            raise ValueError(unsupported("per_channel", True, "False for a checkpoint with one scale a weight"))
        kept = [*(saved.get("modules_to_not_convert") or ()), *(asked.modules_to_not_convert or ())]
        source = {field: saved.get(field, default) for field, default in SOURCE_FIELDS.items()}
        own = {"modules_to_not_convert": kept or None, "dequantize": asked.dequantize}
        own["rms_norm_eps"] = float(source["rms_norm_eps"]) if source["use_rms_norm"] else None
        config = cls(**{**asked.to_dict(), **own})
        config.source = source
        return config

    @classmethod
    def _fields(cls):
        return (*super()._fields(), "rms_norm_eps")

    @classmethod
    def scheme_error(cls, scheme):
        for field in cls.scheme_fields:
            if not isinstance(scheme[field], bool):
                return unsupported(field, scheme[field], "True or False")
        return None

    def format(self):
        from hf_efficient.formats.ternary import TernaryFormat

        return TernaryFormat(self.per_channel, self.dense)

    def method_name(self):
        return "rtn"

    def needs_calibration(self):
        return False
