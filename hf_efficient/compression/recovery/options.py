"""The options of a recovery, checked before a model is touched, and the windows of text it learns from."""

import importlib.util
import math
from dataclasses import asdict, dataclass

import torch

from hf_efficient.calibration.data import load_tokens
from hf_efficient.calibration.divergence import DIVERGENCES
from hf_efficient.configs import CalibrationConfig
from hf_efficient.configs.checks import check, is_integer, is_number


LEARNING_RATE, LORA_LEARNING_RATE = 2e-4, 1e-3  # the largest of the schedule, by default


@dataclass(frozen=True)
class RecoveryOptions:
    """Keyword arguments of `recover`, which documents them.

    Raises:
        ValueError: a value that is not allowed; names the argument, the value and what is allowed.
        ImportError: lora_rank without the package `peft`.
    """

    minutes: float | None = None
    steps: int | None = None
    sequence_length: int = 512
    batch_size: int = 1
    learning_rate: float | None = None
    divergence: str = "forward"
    text_share: float = 0.0
    lora_rank: int | None = None
    checkpoint_dir: str | None = None
    seed: int = 0

    def __post_init__(self):
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"minutes={self.minutes}, steps={self.steps}: give one of them")
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            check(value is None or (is_number(value) and 0 < value < math.inf), name, value, "a number above 0")
        for name in ("steps", "batch_size", "sequence_length", "lora_rank"):
            value, least = getattr(self, name), 2 if name == "sequence_length" else 1
            is_optional = name in ("steps", "lora_rank")
            is_count = is_integer(value, least) or (value is None and is_optional)
            check(is_count, name, value, f"an integer of at least {least}")
        check(self.divergence in DIVERGENCES, "divergence", self.divergence, f"one of {DIVERGENCES}")
        is_share = is_number(self.text_share) and 0 <= self.text_share <= 1
        check(is_share, "text_share", self.text_share, "a number from 0 to 1")
        if self.lora_rank is not None and importlib.util.find_spec("peft") is None:
            raise ImportError("lora_rank needs the package 'peft': pip install peft")

    @property
    def largest_rate(self) -> float:
        """The largest learning rate of the schedule."""
        return self.learning_rate or (LORA_LEARNING_RATE if self.lora_rank else LEARNING_RATE)

    def described(self, windows: torch.Tensor) -> dict:
        """JSON-able: what an interrupted recovery on these windows must have in common with the one that goes on."""
        fields = ("batch_size", "divergence", "text_share", "lora_rank", "seed")
        own = {field: value for field, value in asdict(self).items() if field in fields}
        return {**own, "learning_rate": self.largest_rate, "windows": [*windows.shape, windows.sum().item()]}


def check_arguments(**arguments) -> None:
    """Raises what `recover` raises for keyword arguments that no model can have."""
    RecoveryOptions(**arguments)


def read_windows(texts, tokenizer, length: int) -> torch.Tensor:
    """int64 [windows, length] of what `recover` takes as texts. Raises ValueError where there is too little text."""
    if isinstance(texts, CalibrationConfig):
        return load_tokens(texts, tokenizer)
    if isinstance(texts, torch.Tensor):
        return CalibrationConfig(tokens=texts).tokens
    if isinstance(texts, str) or not texts:
        raise ValueError(f"texts={texts!r:.40} is not supported: it must be a list of texts, at least one")
    if tokenizer is None:
        raise ValueError("texts are given and no tokenizer: give one, or int64 tokens [windows, length]")
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"the texts have {len(ids)} tokens: a window has sequence_length={length}")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
