"""Which text a data-aware method sees, and where the blocks of the model are computed."""

import math
from collections.abc import Mapping
from typing import Any

from hf_efficient.configs.checks import check, is_collection_of, is_integer, is_number


_SOURCES = ("texts", "dataset", "tokens", "inputs")
_SAVED = ("dataset", "split", "text_column", "num_samples", "sequence_length", "batch_size", "seed", "own_text")
OWN_TEXTS = ("sampled", "random")


class CalibrationConfig:
    """The text for calibration: one of `texts`, `dataset`, `tokens` and `inputs`, or tokens that the model generates.

    Args:
        texts (list of str, at least one; default None): documents. Other collections whose order is fixed are copied.
        dataset (str; default None): path of a .txt file (one document), path of a .jsonl file (one document a line, in
            the field `text_column`), or a dataset id of the Hub, with a subset as "owner/name:subset" (needs
            `datasets`).
        split (str; default "train"): split of a Hub dataset.
        text_column (str; default "text"): field or column that holds the text.
        tokens (int64 tensor [windows, tokens]; default None): used as it is; sets `num_samples` and `sequence_length`.
        inputs (list of dicts of tensors, at least one; default None): arguments of the model's forward, one dict a
            batch, for models that read something else than text.
        num_samples (int >= 1; default 128): windows of text.
        sequence_length (int >= 1; default 512): tokens of a window.
        batch_size (int >= 1; default 2): windows that are computed together.
        device (str or torch.device; default None): where a block is computed; None: the first accelerator, else where
            the model is.
        checkpoint_dir (str or path; default None): folder that keeps the progress after every block, so that an
            interrupted run resumes there.
        seed (int; default 0): seed of the order in which documents are drawn, and of tokens that the model generates.
        minutes (number above 0; default None): after its blocks are compressed, tune the whole model for this time on
            the next-token distributions of the original one: all that `refine` tunes, and norms and biases. Needs
            `refine=True` in a `WeightOnlyConfig`. It runs on the model's device, and takes 16 bytes of memory per
            compressed weight. None: no such tuning.
        own_text ("sampled", "random" or None; default None): which tokens to take where none of the four sources is
            given. "sampled": text that the model writes (LLM-QAT, https://arxiv.org/abs/2305.17888). "random": tokens
            of its vocabulary, drawn uniformly; enough for methods that read only the size of each channel. None means
            "sampled". Both take no more tokens a window than the model has positions.

    Raises:
        ValueError: a value that is not allowed, or two sources; names the argument, the value and what is allowed.
    """

    def __init__(
        self,
        /,
        texts: list[str] | None = None,
        dataset: str | None = None,
        split: str = "train",
        text_column: str = "text",
        tokens=None,
        inputs: list[dict[str, Any]] | None = None,
        num_samples: int = 128,
        sequence_length: int = 512,
        batch_size: int = 2,
        device: str | None = None,
        checkpoint_dir: str | None = None,
        seed: int = 0,
        own_text: str | None = None,
        minutes: float | None = None,
        **unknown,
    ):
        if unknown:
            allowed = [*_SOURCES, *_SAVED[1:], "device", "checkpoint_dir", "minutes"]
            raise ValueError(f"CalibrationConfig has no argument {sorted(unknown)[0]!r}: allowed are {allowed}")
        self.texts, self.dataset, self.split, self.text_column = texts, dataset, split, text_column
        self.tokens, self.inputs = tokens, inputs
        self.num_samples, self.sequence_length, self.batch_size = num_samples, sequence_length, batch_size
        self.device = None if device is None else str(device)
        self.checkpoint_dir = None if checkpoint_dir is None else str(checkpoint_dir)
        self.seed, self.own_text, self.minutes = seed, own_text, minutes
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: allowed is one of {_SOURCES}")
        check(own_text in (*OWN_TEXTS, None), "own_text", own_text, f"one of {OWN_TEXTS} or None")
        check(own_text is None or not given, "own_text", own_text, f"None where {given[:1]} is given")
        if isinstance(texts, (set, frozenset)):
            raise ValueError(f"texts is a {type(texts).__name__}, whose order differs from run to run: give a list")
        if texts is not None:
            are_texts = not isinstance(texts, Mapping) and is_collection_of(texts, str)
            check(are_texts, "texts", texts, "a list of strings, at least one")
            self.texts = list(texts)
        for name in ("split", "text_column", *(["dataset"] if dataset is not None else [])):
            value = getattr(self, name)
            check(isinstance(value, str) and value != "", name, value, "a string that is not empty")
        if tokens is not None:
            if getattr(tokens, "ndim", 0) != 2 or "int64" not in str(getattr(tokens, "dtype", "")) or 0 in tokens.shape:
                form = f"{getattr(tokens, 'dtype', type(tokens).__name__)} {list(getattr(tokens, 'shape', []))}"
                raise ValueError(f"tokens={form} is not supported: it must be an int64 tensor [windows, tokens]")
            self.num_samples, self.sequence_length = tokens.shape
        are_batches = inputs is None or (is_collection_of(inputs, dict) and all(inputs))
        check(are_batches, "inputs", inputs, "a list of dicts of tensors, at least one")
        for name in ("num_samples", "sequence_length", "batch_size"):
            check(is_integer(getattr(self, name), 1), name, getattr(self, name), "a positive integer")
        check(type(seed) is int, "seed", seed, "an integer")
        is_time = minutes is None or (is_number(minutes) and 0 < minutes < math.inf)
        check(is_time, "minutes", minutes, "a number above 0, or None")

    @property
    def source(self) -> str | None:
        """Which of "texts", "dataset", "tokens" and "inputs" is given. None for tokens of the model's own, and for a
        config read from a checkpoint, where the text was not saved."""
        return next((name for name in _SOURCES if getattr(self, name) is not None), None)

    def __eq__(self, other) -> bool:
        """Whether the descriptions (`to_dict`) are the same; texts and tokens are not compared."""
        return type(other) is type(self) and other.to_dict() == self.to_dict()

    def __repr__(self) -> str:
        return f"CalibrationConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """The JSON-able description: without the texts or tokens themselves, the device and the folder; `minutes` where
        the model is tuned as a whole."""
        own = {name: getattr(self, name) for name in _SAVED}
        return own if self.minutes is None else own | {"minutes": self.minutes}
