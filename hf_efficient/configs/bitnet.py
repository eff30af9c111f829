"""Ternary weights with inputs of 8 bits: BitNet b1.58."""

from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig
from hf_efficient.configs.checks import check, check_flags


# fields of transformers' `BitNetQuantConfig` -> their defaults
SOURCE_FIELDS = {
    "linear_class": "bitlinear",
    "quantization_mode": "offline",
    "use_rms_norm": False,
    "rms_norm_eps": 1e-6,
}


class BitNetConfig(CompressionConfig):
    """Weights -1, 0 and 1 times a scale, inputs rounded to 8 bits per token (https://arxiv.org/abs/2402.17764). Pass it
    as `quantization_config` to `from_pretrained`.

    An ordinary checkpoint is ternarised weight by weight, with the mean magnitude as the scale. Only a model trained
    for it (with `hf_efficient.bit_linear.BitLinear`, for example) keeps its quality. A checkpoint of transformers'
    `BitNetQuantConfig` is read as it is.

    Args:
        per_channel (bool; default False): one scale per output row instead of the paper's one per weight.
        dense (bool; default False): five weights in a byte (1.6 bits) instead of four (2 bits) on disk.
        rms_norm_eps (float > 0; default None): each ternary layer normalises its input first, with a child module
            `rms_norm` of this epsilon, as `BitLinear(rms_norm=True)` does. None: it does not.
        modules_to_not_convert (list of str; default None): globs of modules to leave as they are.
        overrides (dict of glob -> fields; default None): other schemes for single modules.
        quantize_lm_head (bool; default False): also compress the output embedding.
        dequantize (bool; default False): turn a compressed checkpoint back into an ordinary model when loading it.
        version (int; default 1): layout of a saved checkpoint; only 1 is read.

    Raises:
        ValueError: a value that is not allowed; names the argument, the value and what is allowed.
    """

    name = "efficient_bitnet"
    scheme_fields = ("per_channel", "dense")
    source: dict[str, Any] | None = None  # `SOURCE_FIELDS` of the checkpoint of transformers that is being read

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
        self._initialize(locals())
        check(self.calibration is None, "calibration", self.calibration, "None: ternarising needs no data")
        is_epsilon = rms_norm_eps is None or (isinstance(rms_norm_eps, float) and rms_norm_eps > 0)
        check(is_epsilon, "rms_norm_eps", rms_norm_eps, "None or a positive float")

    @classmethod
    def of_checkpoint(cls, saved: dict[str, Any], asked: "BitNetConfig | None" = None) -> "BitNetConfig":
        """The config for reading a checkpoint of transformers' `BitNetQuantConfig`.

        Args:
            saved: the `quantization_config` of its config.json.
            asked: the user's config, by default `BitNetConfig()`. The result also leaves out the modules that the
                checkpoint left out, takes the checkpoint's norms, and has `source` set.

        Raises:
            ValueError: `saved` is of another method, or `asked` wants one scale per row, which the checkpoint lacks.
        """
        asked = asked or cls()
        if saved.get("quant_method") != "bitnet":
            raise ValueError(f"quant_method={saved.get('quant_method')!r} of the checkpoint is not 'bitnet'")
        check(not asked.per_channel, "per_channel", True, "False for a checkpoint with one scale a weight")
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
    def check_scheme(cls, scheme):
        check_flags(scheme, *cls.scheme_fields)

    def format(self):
        from hf_efficient.formats.ternary import TernaryFormat

        return TernaryFormat(self.per_channel, self.dense)

    def method_name(self):
        return "rtn"

    def needs_calibration(self):
        return False
