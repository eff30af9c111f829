"""What a `WeightOnlyConfig` chooses where the user does not: the method, its text, the groups.

The choices are the best ones that `benchmarks/quality.py` has measured at their bits and in their time.
"""

from typing import Any

from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.configs.checks import check


AUTO = "auto"
BLOCK_SIZES = {"mxfp4": 32, "nvfp4": 16}  # weights that share a scale in the FP4 formats of today's hardware
# methods with formats of their own -> bits of a code
OWN_FORMATS = {"billm": (2,), "db_llm": (2,), "pb_llm": (1,), "slim_llm": (2, 3)}
_OWN_GROUPS = {"billm": 128, "db_llm": 64, "pb_llm": -1, "slim_llm": 64}
QUALITIES = ("fast", "balanced", "best")
_RANDOM_WINDOWS = 4  # tokens enough for the mean squares of the channels
_WINDOWS = {"balanced": 32, "best": 128}


def choose(given: dict[str, Any], quality: str | None) -> dict[str, Any]:
    """The arguments of a `WeightOnlyConfig` without "auto", but for an `int8_on_cpu` that depends on the CPU.

    Raises:
        ValueError: `quality` and what it would choose are both given.
    """
    bits, codebook, method, calibration = (given[name] for name in ("bits", "codebook", "method", "calibration"))
    chosen = dict(given)
    own = method if isinstance(method, str) and method in OWN_FORMATS else None
    if given["symmetric"] == AUTO:
        is_signed = own not in (None, "slim_llm")
        by_row = bits == 8 and given["group_size"] == AUTO and codebook is None
        chosen["symmetric"] = is_signed or by_row and method != "hqq"
    if given["group_size"] == AUTO:
        fixed = BLOCK_SIZES | {"trellis": -1}
        name = codebook if isinstance(codebook, str) else None  # anything else is refused later
        of_grids = -1 if bits == 8 else 32 if quality == "best" and codebook is None else 64
        chosen["group_size"] = _OWN_GROUPS.get(own) or fixed.get(name, of_grids)
    if given["rotate"] == AUTO:
        chosen["rotate"] = codebook == "trellis" or given["activation_bits"] is not None
    if given["int8_on_cpu"] == AUTO and (own or codebook is not None or given["activation_bits"] is not None):
        chosen["int8_on_cpu"] = False  # their kernels take inputs as they are
    if method == AUTO:
        quality = quality or ("fast" if calibration is None else "balanced")
        chosen |= _method(chosen, quality)
    else:
        check(quality is None, "quality", quality, f"None with method={method!r}: it chooses the method")
    if given["zero_point"] == AUTO:
        is_float = chosen["method"] == "hqq" and bits != 8 and not chosen["symmetric"]
        chosen["zero_point"] = "float" if is_float else "integer"
    return chosen


def _method(given: dict[str, Any], quality: str) -> dict[str, Any]:
    """The method of `quality`, and the text it needs where none is given."""
    calibration = given["calibration"]
    tunes = given["refine"] or given["mixed_precision"]
    if quality == "fast" and not tunes:
        if given["bits"] == 8 or given["codebook"] is not None or given["rotate"]:
            return {"method": "rtn"}
        return {"method": "mse", "calibration": random_tokens() if calibration is None else calibration}
    tuned = "balanced" if quality == "fast" else quality
    refines = given["refine"] or given["codebook"] is None or (given["codebook"], quality) == ("trellis", "best")
    text = own_text(tuned) if calibration is None else calibration
    return {"method": "gptq", "refine": refines, "calibration": text}


def random_tokens() -> CalibrationConfig:
    """Tokens drawn uniformly, of which "mse" learns how large the inputs of each layer are."""
    return CalibrationConfig(own_text="random", num_samples=_RANDOM_WINDOWS)


def own_text(quality: str) -> CalibrationConfig:
    """Text that the model writes itself, as much as `quality` takes."""
    return CalibrationConfig(num_samples=_WINDOWS[quality])


def needs_text(fields: dict[str, Any]) -> bool:
    """Whether the fields of an override ask for what random tokens do not serve."""
    from hf_efficient import methods

    needs = "method" in fields and methods.get_method(fields["method"]).NEEDS
    return bool(needs or fields.get("refine") or fields.get("mixed_precision"))


def data_free(scheme: dict[str, Any]) -> dict[str, Any]:
    """`scheme` with the best method that reads the weight alone in the place of "mse": "hqq" with float zero points,
    "rtn" for symmetric grids."""
    if scheme["method"] != "mse":
        return scheme
    return scheme | ({"method": "rtn"} if scheme["symmetric"] else {"method": "hqq", "zero_point": "float"})
