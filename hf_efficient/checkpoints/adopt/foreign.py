"""What every format of another library answers, and what they share."""

import torch

from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES, StoredWeight
from hf_efficient.kernels.linear.codes import packed_width, unpack_codes


class Foreign:
    """A format of another library, as the `quantization_config` of one checkpoint describes it.

    Attributes:
        parts: names of the tensors that stand for a weight, after the module's name and a dot.
        unchanged: names of further tensors of such a module, which are loaded as they are.
        unread: names of those that say nothing of its weight.
        codes: names of parts that hold codes, whatever their dtype says.
        config: which config of ours describes it.
    """

    parts: tuple[str, ...]
    unchanged: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    config: str = "WeightOnlyConfig"

    def __init__(self, saved: dict):
        """saved: the dict of the checkpoint's `quantization_config`. Raises ValueError for a kind that is not read."""
        self.saved = saved

    def prepare(self, model) -> None:
        """Called once with the model on the meta device, before any other method."""

    def holds(self, stored: StoredWeight) -> bool:
        """Whether these tensors are of this format, not an ordinary weight."""
        return self.parts[0] in stored

    def scheme(self, stored: StoredWeight, out_features: int, in_features: int, dtype: torch.dtype) -> dict:
        """The scheme of `config` that holds this weight of a model in `dtype`. Raises ValueError, naming the tensor,
        what it is and what was expected, unless all its tensors have the dtypes and shapes they must."""
        raise NotImplementedError

    def config_of(self, model, schemes: dict[str, dict]):
        """Our config for a checkpoint whose modules have `schemes`, by name."""
        from hf_efficient.checkpoints.adopt.schemes import config_of

        return config_of(model, self.config, schemes)

    def convert(
        self, tensors: dict[str, torch.Tensor], out_features: int, in_features: int, format, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The tensors of a weight by part -> the canonical tensors of `format`, that of `scheme`. dtype: of the
        model."""
        raise NotImplementedError


def scale_dtype(stored: StoredWeight, part: str, dtype: torch.dtype) -> str | None:
    """`scale_dtype` of a scheme whose scales are the tensor `part`: None where it is the model's dtype."""
    name = SCALE_DTYPES[stored.places[part].dtype]
    return None if getattr(torch, name) is dtype else name


def text(value) -> str:
    """The words of a value of another library's config, which may be of an enum."""
    return str(getattr(value, "value", value))


def typed(field: str, value, kinds: tuple[type, ...], allowed: str):
    """`value` where it is of one of `kinds` (True and False are no integers), or ValueError."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"quantization_config: {field}={value!r} is not supported: it must be {allowed}")
    return value


def one_of(field: str, value, allowed):
    """`value`, or ValueError."""
    if value not in allowed:
        raise ValueError(
            f"quantization_config: {field}={value!r} is not read by hf_efficient, which reads {list(allowed)}"
        )
    return value


def stream_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] that hold a little-endian stream of bits -> its bytes, uint8 [..., 4 W]."""
    return words.contiguous().view(torch.uint8)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [R, W] that hold a little-endian stream of `count` codes a row, and what fills the last word -> uint8
    [R, count]."""
    return unpack_codes(stream_bytes(words)[:, : packed_width(count, bits)], bits, count)


def as_grid(zero: torch.Tensor, bits: int, name: str = "zero points") -> torch.Tensor:
    """Integer zero points as uint8. Raises ValueError where one is no code of `bits` bits."""
    low, high = (limit.item() for limit in zero.aminmax()) if zero.numel() else (0, 0)
    if low < 0 or high >= 2**bits:
        raise ValueError(f"{name} from {low} to {high}, expected codes of {bits} bits, 0 to {2**bits - 1}")
    return zero.to(torch.uint8)
