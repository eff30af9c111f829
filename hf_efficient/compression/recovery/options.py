"""The options of a recovery, checked before a model is touched."""

import hashlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TrainerCallback

from hf_efficient.cache.stores.kv_formats import KV_FORMATS
from hf_efficient.calibration.divergence import DIVERGENCES
from hf_efficient.compression.recovery.optimizers import OPTIMIZERS, check_optimizer
from hf_efficient.compression.recovery.plot import check_plot
from hf_efficient.compression.stored_text import fingerprint
from hf_efficient.configs.checks import check, check_choices, check_flags, is_integer, is_number
from hf_efficient.files import alone_in, why_not_writable


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
    optimizer: str = "adamw"
    memory_gb: float | None = None
    gradient_checkpointing: bool = False
    warm_up: float = 0.0
    callbacks: Sequence = ()
    kv_format: str = "auto"
    plot: str | os.PathLike | None = None

    def __post_init__(self):
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(f"minutes={self.minutes}, steps={self.steps}: give one of them")
        for name in ("minutes", "learning_rate", "memory_gb"):
            value = getattr(self, name)
            check(value is None or (is_number(value) and 0 < value < math.inf), name, value, "a number above 0")
        for name in ("steps", "batch_size", "sequence_length", "lora_rank"):
            value, least = getattr(self, name), 2 if name == "sequence_length" else 1
            is_optional = name in ("steps", "lora_rank")
            is_count = is_integer(value, least) or (value is None and is_optional)
            check(is_count, name, value, f"an integer of at least {least}")
        check_choices(vars(self), divergence=DIVERGENCES, optimizer=OPTIMIZERS, kv_format=KV_FORMATS)
        check_flags(vars(self), "gradient_checkpointing")
        for name in ("text_share", "warm_up"):
            value = getattr(self, name)
            check(is_number(value) and 0 <= value <= 1, name, value, "a number from 0 to 1")
        check(is_integer(self.seed, 0) and self.seed < 1 << 32, "seed", self.seed, "an integer from 0 to 2**32 - 1")
        are_callbacks = isinstance(self.callbacks, Sequence) and all(map(_is_callback, self.callbacks))
        check(are_callbacks, "callbacks", self.callbacks, "a list of TrainerCallbacks")
        check_folder(self.checkpoint_dir)
        check_optimizer(self.optimizer)
        check_plot(self.plot)
        check_processes(self.batch_size)
        if self.lora_rank is not None and importlib.util.find_spec("peft") is None:
            raise ImportError("lora_rank needs the package 'peft': pip install peft")

    @property
    def largest_rate(self) -> float:
        """The largest learning rate of the schedule."""
        return self.learning_rate or (LORA_LEARNING_RATE if self.lora_rank else LEARNING_RATE)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other training is inside with this `checkpoint_dir`. Raises ValueError where one is."""
        is_first = int(os.environ.get("RANK", 0)) == 0  # of the processes that train together
        with alone_in(self.checkpoint_dir) if self.checkpoint_dir is not None and is_first else nullcontext():
            yield

    def described(self, model, teacher, windows: torch.Tensor) -> dict:
        """JSON-able: what an interrupted training on these windows must have in common with the one that goes on."""
        fields = ("batch_size", "divergence", "text_share", "lora_rank", "seed", "optimizer", "warm_up", "kv_format")
        own = {field: getattr(self, field) for field in fields}
        if self.checkpoint_dir is not None:
            own |= {"model": fingerprint(model), "teacher": fingerprint(teacher)}
        digest = hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()
        return {**own, "learning_rate": self.largest_rate, "windows": [*windows.shape, digest]}


def check_arguments(**arguments) -> None:
    """Raises what `recover` raises for keyword arguments that no model can have."""
    RecoveryOptions(**arguments)


def check_folder(folder) -> None:
    """Raises ValueError for a checkpoint_dir that cannot be written."""
    if folder is None:
        return
    is_path = isinstance(folder, (str, os.PathLike)) and bool(os.fspath(folder))
    check(is_path, "checkpoint_dir", folder, "a folder")
    if reason := why_not_writable(Path(folder) / "state"):
        raise ValueError(f"checkpoint_dir={os.fspath(folder)!r} {reason}")


def _is_callback(value) -> bool:
    return isinstance(value, TrainerCallback) or (isinstance(value, type) and issubclass(value, TrainerCallback))


def check_processes(batch_size: int) -> None:
    """Raises ValueError where this process is one of several that cannot train together."""
    shards = int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") or shards > 1:
        raise ValueError(
            "FSDP and FSDP2 are not supported: they would shard the learned weights away from the codes, scales and "
            "masks of their layers. Launch with DDP (accelerate launch --multi_gpu, or torchrun)"
        )
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if batch_size % processes:
        raise ValueError(f"batch_size={batch_size}: {processes} processes share it, so it must be a multiple of that")
