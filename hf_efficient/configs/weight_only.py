"""Weights in few bits, activations as they are."""

import copy
import functools
import pkgutil
from pathlib import Path
from typing import Any

from hf_efficient.configs.base import CONFIG_VERSION, CompressionConfig, module_matches
from hf_efficient.configs.checks import check, check_choices, check_flags, is_integer, naming
from hf_efficient.configs.quality import (
    AUTO,
    BLOCK_SIZES,
    OWN_FORMATS,
    QUALITIES,
    choose,
    data_free,
    needs_text,
    own_text,
    random_tokens,
)


WEIGHT_BITS = (2, 3, 4, 6, 8)
EMBEDDING_BITS = (4, 8)
ACTIVATION_BITS = (4, 6)
CODEBOOKS = ("nf4", "fp4", "mxfp4", "nvfp4", "kmeans", "trellis")
ZERO_POINTS = ("integer", "float", "minimum")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
TRELLIS_BITS = (1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5)
_TRELLIS_ALLOWED = f"one of {TRELLIS_BITS} for codebook='trellis', or with mixed_precision a number between them"
_GROUP_SIZES = "a positive multiple of 8, -1 (one group per output channel) or None (one scale for the tensor)"


@functools.cache
def available_methods() -> list[str]:
    """Names of the weight quantization methods: the files of `hf_efficient/methods`."""
    files = pkgutil.iter_modules([str(Path(__file__).parents[1] / "methods")])
    return sorted(module.name for module in files if not module.name.startswith("_"))


class WeightOnlyConfig(CompressionConfig):
    """Quantizes weights to few bits, and leaves activations as they are (or rounds them to 4 or 6 bits). Pass it as
    `quantization_config` to `from_pretrained`.

    A weight [out_features, in_features] becomes unsigned codes with `w = (code - zero_point) * scale`. Every
    `group_size` neighbours along in_features share a scale; a width that `group_size` does not divide gets a short last
    group. With a codebook, `w = codebook[code] * scale`.

    `WeightOnlyConfig()` alone is a good start. `quality` and `bits` choose the arguments that are left out; the choice
    is stored in the fields of the config.

    Args:
        bits (2, 3, 4, 6 or 8; default 4): bits of a code. 6 bits are 6 on disk and 8 in memory. With `mixed_precision`
            the average over the layers. With codebook="trellis" 1.5 to 5 in halves (on average any number), with
            method="pb_llm" 1. In an override of the experts of a mixture also a list: the bits of each.
        group_size (int or None; default "auto"): weights that share a scale: a positive multiple of 8, -1 for one group
            per output channel, None for one scale for the whole tensor. "auto" is -1 with 8 bits or a trellis, 32
            with "mxfp4" or quality="best", 16 with "nvfp4", 128 with method="billm", -1 with "pb_llm", else 64. The C++
            kernels store codes in more bits if it is no multiple of 16 (2 bits) or 32 (3 bits); the Triton kernels
            need a multiple of 32.
        symmetric (bool; default "auto"): zero is the middle of the grid and no zero point is stored. False stores a
            zero point per group. "auto" is True with 8 bits and group_size="auto", except for method="hqq".
        method (str; default "auto"): how codes, scales and zero points are chosen; a file of `hf_efficient/methods`,
            see `available_methods`. "rtn" (round to nearest), "mse" (clipped for the least squared error), "hqq" and
            "kmeans" need no data, though "mse" and "kmeans" are better with it. "gptq"
            (https://arxiv.org/abs/2210.17323) and "awq" (https://arxiv.org/abs/2306.00978) read `calibration`, or text
            that the model writes itself. "billm" (https://arxiv.org/abs/2402.04291; bits=2),
            "db_llm" (https://arxiv.org/abs/2402.11960; bits=2) and "pb_llm" (https://arxiv.org/abs/2310.00034; bits=1
            for most weights, 8 for the salient tenth) store few magnitudes in formats of their own. On CPUs kernels
            read the 2 bits of the first two; "pb_llm", and on GPUs all three, run as 8 bits. "slim_llm"
            (https://arxiv.org/abs/2405.14917; bits=2 or 3) is "gptq" with a bit more for the groups of columns that
            matter most and one less for as many others. "yaqa" (https://arxiv.org/abs/2505.22988; grids and trellises)
            minimises the divergence of the whole model instead of each layer's output error. It needs a causal language
            model, a backward pass, and 4 * outputs^2 bytes of memory per layer. "auto" is what `quality` chooses.
        quality ("fast", "balanced", "best" or None; default None): chooses the method by the time that it takes, if
            `method` is left out. "fast" takes seconds and no text: "mse" with inputs from random tokens, "rtn" with 8
            bits. For a model that cannot run while it is loaded (several devices, tensor parallelism, no token ids as
            input), it is "hqq" with float zero points. "balanced" and "best" take minutes: "gptq" with `refine`, on few
            and on many windows of text. "best" has groups of 32. Codebooks are refined only by "best" with "trellis",
            or if `refine` is True. None is "balanced" if `calibration` is given, else "fast".
        codebook ("nf4", "fp4", "mxfp4", "nvfp4", "kmeans", "trellis" or None; default None): codes are indices into a
            table instead of points of a grid. "nf4" (https://arxiv.org/abs/2305.14314) and "fp4" have 4 bits. "mxfp4"
            (https://arxiv.org/abs/2310.10537) and "nvfp4" are formats of hardware: E2M1 with a scale of 8 bits for 32
            or 16 weights. "kmeans" learns tables of 2, 3 or 4 bits. "trellis" (QTIP,
            https://arxiv.org/abs/2406.11235) lets neighbouring weights of a column share bits and has one scale per
            row. It lost least of all methods measured at 2 to 4 bits, and takes minutes.
        double_quantization (bool; default False): also store the scales of a codebook in 8 bits (QLoRA).
        rotate (bool; default "auto": True with codebook="trellis" or activation_bits): spread outliers by random
            Hadamard rotations (QuIP, https://arxiv.org/abs/2307.13304; QuaRot, https://arxiv.org/abs/2404.00456). The
            inverse is applied to the input unless it folds into other weights.
        refine (bool; default False): after each block, tune scales and rounding by gradient on the block's outputs,
            over the calibration text. With codebook="trellis", tune a factor per row and per input, and no codes.
        mixed_precision (bool; default False): `bits` is the average. Layers, and experts of a mixture, get more bits
            if their errors on the calibration text raise the loss more, and experts also if many tokens reach them.
            With codebook="trellis" all fused experts have the largest number of bits up to `bits` that a trellis
            can have.
        int8_on_cpu (bool or "auto"; default "auto"): with the C++ kernels, layers of bfloat16 models round their inputs
            to 8 bits, with a scale for every 64 columns of a row: faster prompts and batches at a small loss. A value
            that is more than twice as large as the other 63 is not rounded, like an outlier in LLM.int8(). "auto"
            rounds in forwards of at least 32 tokens (8 on CPUs without AVX-512 BF16) where that is faster: on x86 CPUs
            without AMX, with groups of at least 32 columns, and for codes of 8 bits only with VNNI. True rounds in all
            forwards; with AMX only in those of at most 32 tokens, because prompts are faster unrounded. It is False
            for codebooks and methods with their own formats.
        activation_bits (4, 6 or None; default None): also round the inputs of layers: 4 is W4A4, 6 is W4A6, or with
            bits=6 W6A6. Every 16 columns of a row have a grid that spans their range. `refine` tunes weights for
            rounded inputs, except those of fused experts. Nothing gets faster, because rounded inputs are stored as
            floats: the option shows what a model would lose.
        modules_to_not_convert (list of str; default None): globs (see `module_matches`) of modules to leave as they
            are, in addition to the output embedding and the modules tied to it.
        overrides (dict of glob -> fields; default None): other schemes for single modules, for example
            `{"*.mlp.down_proj": {"bits": 8}}`. The first glob that matches counts. Fields not given are those of this
            config; None in place of the fields leaves the module as it is.
        quantize_lm_head (bool; default False): also quantize the output embedding; one that is tied to the input
            embedding is untied.
        embeddings (bool; default False): also quantize the input embedding, whose rows are dequantized when they are
            looked up: in 8 bits with a scale a row, by "rtn", whatever the other arguments say. An override that
            matches its name changes that: `{"*embed_tokens": {"bits": 4}}` means groups of 64 with zero points, by
            "mse". It may set bits (8 or 4), group_size, symmetric, int8_on_cpu, and a method that needs no data. A tied
            output embedding shares the codes, unless `quantize_lm_head=True` gives it its own.
        calibration (`CalibrationConfig` or a dict of its arguments; default None): the text that data-aware methods
            read. None: text that the model writes itself.
        dequantize (bool; default False): turn a quantized checkpoint back into an ordinary model when loading it.
        input_scale (bool; default False): set by calibration for modules whose input is multiplied by stored factors.
        zero_point ("integer", "float" or "minimum"; default "auto"): what an asymmetric grid stores. "auto" is "float"
            for method="hqq" below 8 bits, the only one that supports it, else "integer". "minimum" means `w = code *
            scale + minimum`. It, `scale_dtype` and `input_order` are for checkpoints of other libraries
            (`hf_efficient.adopt`).
        scale_dtype ("float16", "bfloat16", "float32" or None; default None): dtype of stored scales; None: the
            weight's.
        input_order (bool; default False): the columns of the weight are stored permuted, and the input is permuted
            likewise.
        version (int; default 1): layout of a saved checkpoint; only 1 is read.

    Raises:
        ValueError: a value that is not allowed, or that contradicts another; names the argument, the value and what is
            allowed.
    """

    name = "efficient_weight_only"
    tunes_models = True
    scheme_fields = (
        *("bits", "group_size", "symmetric", "method", "codebook", "double_quantization"),
        *("rotate", "refine", "mixed_precision", "int8_on_cpu", "input_scale"),
        *("zero_point", "scale_dtype", "input_order", "activation_bits"),
    )

    def __init__(
        self,
        /,
        bits: int | float = 4,
        group_size: int | str | None = AUTO,
        symmetric: bool | str = AUTO,
        method: str = AUTO,
        codebook: str | None = None,
        double_quantization: bool = False,
        rotate: bool | str = AUTO,
        refine: bool = False,
        mixed_precision: bool = False,
        int8_on_cpu: bool | str = AUTO,
        modules_to_not_convert: list[str] | None = None,
        overrides: dict[str, Any] | list | None = None,
        quantize_lm_head: bool = False,
        embeddings: bool = False,
        calibration=None,
        dequantize: bool = False,
        input_scale: bool = False,
        zero_point: str = AUTO,
        scale_dtype: str | None = None,
        input_order: bool = False,
        activation_bits: int | None = None,
        quality: str | None = None,
        version: int = CONFIG_VERSION,
        **unknown,
    ):
        given = {name: value for name, value in locals().items() if name != "quality"}
        check(quality in (*QUALITIES, None), "quality", quality, f"one of {QUALITIES} or None")
        self.is_automatic = method == AUTO
        self._asked = {name: given[name] for name in (*self.scheme_fields, "calibration")} | {"quality": quality}
        check_flags(given, "embeddings")
        self.embeddings = embeddings
        self._initialize(choose(given, quality))

    @classmethod
    def check_scheme(cls, scheme):
        bits, group_size, method, codebook = (scheme[name] for name in ("bits", "group_size", "method", "codebook"))
        check_choices(scheme, method=available_methods())
        if codebook == "trellis":
            check(_is_of_trellis(bits, scheme["mixed_precision"]), "bits", bits, _TRELLIS_ALLOWED)
        elif method in OWN_FORMATS:
            _check_own_format(scheme)
        elif isinstance(bits, list):
            _check_expert_bits(scheme)
        else:
            check_choices(scheme, bits=WEIGHT_BITS)
        is_width = is_integer(group_size, -1) and (group_size == -1 or (group_size > 0 and group_size % 8 == 0))
        check(group_size is None or is_width, "group_size", group_size, _GROUP_SIZES)
        check_flags(scheme, "symmetric", "double_quantization", "rotate", "refine", "mixed_precision")
        check_flags(scheme, "input_scale", "input_order")
        check_choices(scheme, codebook=(*CODEBOOKS, None), int8_on_cpu=(True, False, AUTO))
        check_choices(scheme, activation_bits=(*ACTIVATION_BITS, None))
        twice = scheme["activation_bits"] is not None and scheme["int8_on_cpu"] is not False
        check(not twice, "int8_on_cpu", scheme["int8_on_cpu"], "False with activation_bits: inputs are rounded once")
        if codebook in ("nf4", "fp4", *BLOCK_SIZES):
            check(bits == 4, "bits", bits, f"4 for codebook={codebook!r}")
        if codebook in BLOCK_SIZES:
            block = BLOCK_SIZES[codebook]
            check(group_size == block, "group_size", group_size, f"{block} for codebook={codebook!r}")
            for field, only in (("double_quantization", False), ("scale_dtype", None)):
                check(scheme[field] == only, field, scheme[field], f"{only} for codebook={codebook!r}")
        if codebook == "trellis":
            check(group_size == -1, "group_size", group_size, "-1 for codebook='trellis': one scale a row")
            check(not scheme["double_quantization"], "double_quantization", True, "False for codebook='trellis'")
            check(scheme["scale_dtype"] is None, "scale_dtype", scheme["scale_dtype"], "None for codebook='trellis'")
        if codebook == "kmeans":
            check(bits < 6, "bits", bits, "2, 3 or 4 for codebook='kmeans'")
        served = {"rtn": True, "gptq": True, "kmeans": codebook == "kmeans", "yaqa": codebook in (None, "trellis")}
        methods = [name for name in available_methods() if served.get(name, codebook is None)]
        check(method in methods, "method", method, f"one that serves codebook={codebook!r}: {methods}")
        if method == "hqq":
            check(not scheme["symmetric"], "symmetric", True, "False for method='hqq', which chooses zero points")
        check_choices(scheme, zero_point=ZERO_POINTS, scale_dtype=(*SCALE_DTYPES, None))
        has_zero_point = not scheme["symmetric"] and codebook is None
        is_stored = scheme["zero_point"] == "integer" or has_zero_point
        check(is_stored, "zero_point", scheme["zero_point"], "'integer' where none is stored")
        if codebook is None:
            check(not scheme["double_quantization"], "double_quantization", True, "False where there is no codebook")
        else:
            for field in ("mixed_precision", "int8_on_cpu"):
                is_served = not scheme[field] or (field, codebook) == ("mixed_precision", "trellis")
                check(is_served, field, scheme[field], f"False for codebook={codebook!r}")

    @property
    def asked_calibration(self):
        return None if self._asked["calibration"] is None else self.calibration

    def plain(self):
        asked = super().plain() | {"bits": self.bits, "codebook": self.codebook, "method": self.method}
        plain = choose(asked, None)
        if (group_size := plain["group_size"]) != self.group_size:  # which other choices follow
            plain = choose(asked | {"group_size": self.group_size}, None) | {"group_size": group_size}
        return plain | {"bits": 4, "codebook": None, "method": None}

    @classmethod
    def _fields(cls):
        return (*super()._fields(), "embeddings")

    def for_embedding(self, *names: str) -> "WeightOnlyConfig | None":
        """The config of the input embedding, a module with these names: 8 bits with the first matching override
        applied, or None to leave it as it is.

        Raises:
            ValueError: the override asks for what an embedding does not have.
        """
        patterns = (p for p in self._given_overrides if any(module_matches(p, name) for name in names))
        pattern = next(patterns, None)
        fields = {} if pattern is None else self._given_overrides[pattern]
        if fields is None:
            return None
        with naming(f"overrides[{pattern!r}] of the input embedding {names[0]}"):
            given = {"bits": 8, "zero_point": "integer", **fields}
            own = type(self)(**{"method": "rtn" if given["bits"] == 8 else "mse", **given})
            check_choices(own.scheme(), bits=EMBEDDING_BITS, codebook=(None,), zero_point=("integer",))
            check(own.group_size is not None, "group_size", None, "-1 or a positive multiple of 8")
            for field in ("activation_bits", "rotate", "refine", "mixed_precision", "input_scale", "input_order"):
                check(not own.scheme()[field], field, own.scheme()[field], "left out for an embedding")
            check(own.scale_dtype is None, "scale_dtype", own.scale_dtype, "None for an embedding")
            check(not own.needs_calibration(), "method", own.method, "one that needs no data: rtn, mse or hqq")
        return own

    def settled(self, can_run: bool) -> "WeightOnlyConfig":
        """This config when a model is loaded: nothing in it is left to choose.

        Args:
            can_run: the model can be run on tokens of its own. If not, a method that was not asked for is one that
                reads weights alone.
        """
        config = copy.copy(self)
        if self.is_automatic and self.asked_calibration is None:  # what is measured is chosen here, too
            own, each = self.scheme(), [fields or {} for fields in self.overrides.values()]
            methods = {own["method"], *(fields.get("method") for fields in each)}
            if own["method"] != "gptq" and any(map(needs_text, each)):
                config.calibration = own_text("balanced")
            elif can_run and "mse" in methods and self.calibration is None:
                config.calibration = random_tokens()
            if not can_run:
                top = data_free(own)
                config.__dict__ |= top
                config.overrides = {
                    pattern: fields and {k: v for k, v in data_free(own | fields).items() if v != top[k]}
                    for pattern, fields in self.overrides.items()
                }
                if config.calibration is not None and config.calibration.own_text == "random":
                    config.calibration = None
        config._asked, config.is_automatic = config.scheme() | {"quality": None, "calibration": None}, False
        return config

    def _merged(self, fields):
        quality = None if "method" in fields else self._asked["quality"]
        chosen = choose({**self._asked, **fields}, quality)
        return {field: chosen[field] for field in self.scheme_fields}

    def _checked_overrides(self, overrides):
        """Overrides with all that they change: other bits also mean another group size and method where those are left
        out."""
        checked, own = super()._checked_overrides(overrides), self.scheme()
        self._given_overrides = {pattern: fields and dict(fields) for pattern, fields in checked.items()}
        for pattern, fields in checked.items():
            if fields is not None:
                merged = self._merged(fields)
                checked[pattern] = {**{f: v for f, v in merged.items() if v != own[f]}, **fields}
        return checked

    def format(self):
        from hf_efficient.formats import binary
        from hf_efficient.formats.codebook import CodebookFormat
        from hf_efficient.formats.expert_bits import integer_codes
        from hf_efficient.formats.group_bits import GroupBitsFormat
        from hf_efficient.formats.transformed import TransformedFormat
        from hf_efficient.formats.trellis import TrellisFormat

        if self.codebook == "trellis":
            inner = TrellisFormat(self.bits)
        elif self.method == "slim_llm":
            inner = GroupBitsFormat(self.bits, self.group_size)
        elif self.method in OWN_FORMATS:
            inner = binary.of_method(self.method, self.group_size)
        elif self.codebook is None:
            grid = self.bits, self.group_size, self.symmetric, self.int8_on_cpu
            inner = integer_codes(*grid, self.zero_point, self.scale_dtype)
        else:
            table = self.codebook, self.bits, self.group_size
            inner = CodebookFormat(*table, self.double_quantization, self.scale_dtype)
        if not (self.input_scale or self.rotate or self.input_order or self.activation_bits):
            return inner
        return TransformedFormat(inner, self.input_scale, self.rotate, self.input_order, self.activation_bits)

    def method_name(self):
        return "kmeans" if self.codebook == "kmeans" and self.method == "rtn" else self.method

    def needs_calibration(self):
        method = self.method_module()
        uses = self.calibration is not None and getattr(method, "USES", ())
        return bool(self.refine or self.mixed_precision or method.NEEDS or uses)


def _is_of_trellis(bits: Any, is_average: bool) -> bool:
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        return False
    return TRELLIS_BITS[0] <= bits <= TRELLIS_BITS[-1] if is_average else bits in TRELLIS_BITS


def _check_expert_bits(scheme: dict[str, Any]) -> None:
    """Refuses what the experts of a mixture do not have where each has bits of its own."""
    bits = scheme["bits"]
    allowed = f"a list of one of {WEIGHT_BITS} for each expert"
    check(bool(bits) and all(type(b) is int and b in WEIGHT_BITS for b in bits), "bits", bits, allowed)
    for field in ("activation_bits", "codebook", "rotate", "input_scale", "input_order", "scale_dtype"):
        check(not scheme[field], field, scheme[field], f"left out where bits is a list, as {bits}")
    check(scheme["group_size"] is not None, "group_size", None, "-1 or a positive multiple of 8 where bits is a list")


def _check_own_format(scheme: dict[str, Any]) -> None:
    """Refuses what the formats of BiLLM, DB-LLM, PB-LLM and SliM-LLM do not have."""
    method, bits = scheme["method"], scheme["bits"]
    allowed = OWN_FORMATS[method]
    check(is_integer(bits, 1) and bits in allowed, "bits", bits, f"one of {allowed} for method={method!r}")
    only = dict(codebook=None, int8_on_cpu=False, mixed_precision=False, zero_point="integer", scale_dtype=None)
    only["symmetric"] = method != "slim_llm"
    if method == "pb_llm":
        only |= dict(group_size=-1, refine=False)
    for field, value in only.items():
        check(scheme[field] == value, field, scheme[field], f"{value!r} for method={method!r}")
    smallest = 8 if method == "slim_llm" else -1
    is_width = is_integer(scheme["group_size"], smallest)
    check(is_width, "group_size", scheme["group_size"], f"an integer from {smallest} on for method={method!r}")
