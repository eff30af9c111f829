"""Which text a method that needs data sees, and where it is computed."""

from typing import Any

from hf_efficient.configs.base import is_collection, unsupported


_SOURCES = ("texts", "dataset", "tokens", "inputs")
_SAVED = ("dataset", "split", "text_column", "num_samples", "sequence_length", "batch_size", "seed")


class CalibrationConfig:
    """The text that calibration sees: exactly one of `texts`, `dataset`, `tokens` and `inputs`.

    Args:
        texts: documents.
        dataset: path of a .txt file (one document), of a .jsonl file (one document a line, in the field `text_column`), or
            a dataset id of the Hub, with a subset as "owner/name:subset" (needs the package `datasets`).
        split: of a dataset of the Hub.
        text_column: field or column that holds the text.
        tokens: int64 tensor [windows, tokens], used as it is.
        inputs: dicts of arguments of the model's forward, one a batch, for models that read something else than text.
        num_samples: windows of text.
        sequence_length: tokens of a window.
        batch_size: windows that are computed together.
        device: where a block is computed, by default the first accelerator, else where the model is.
        checkpoint_dir: folder that keeps what is done after every block, so that an interrupted run resumes there.
        seed: of the order in which documents are drawn.

    Raises:
        ValueError: any value that is not allowed; names the argument, the value and what is allowed.
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
        **unknown,
    ):
        if unknown:
            allowed = [*_SOURCES, *_SAVED[1:], "device", "checkpoint_dir"]
            raise ValueError(f"CalibrationConfig has no argument {sorted(unknown)[0]!r}: allowed are {allowed}")
        sources = zip(_SOURCES, (texts, dataset, tokens, inputs))
        given = [name for name, value in sources if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: allowed is one of {_SOURCES}")
        if texts is not None and not (is_collection(texts) and texts and all(isinstance(text, str) for text in texts)):
            raise ValueError(unsupported("texts", texts, "a list of strings, at least one"))
        for name, value in (("dataset", dataset), ("split", split), ("text_column", text_column)):
            if not (isinstance(value, str) and value) and not (name == "dataset" and value is None):
                raise ValueError(unsupported(name, value, "a string that is not empty"))
        if tokens is not None:
            if getattr(tokens, "ndim", 0) != 2 or "int64" not in str(getattr(tokens, "dtype", "")) or 0 in tokens.shape:
                form = f"{getattr(tokens, 'dtype', type(tokens).__name__)} {list(getattr(tokens, 'shape', []))}"
                raise ValueError(f"tokens={form} is not supported: it must be an int64 tensor [windows, tokens]")
            num_samples, sequence_length = tokens.shape
        if inputs is not None and not (
            is_collection(inputs) and inputs and all(isinstance(batch, dict) and batch for batch in inputs)
        ):
            raise ValueError(unsupported("inputs", inputs, "a list of dicts of tensors, at least one"))
        for name, value in (
            ("num_samples", num_samples),
            ("sequence_length", sequence_length),
            ("batch_size", batch_size),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(unsupported(name, value, "a positive integer"))
        if type(seed) is not int:
            raise ValueError(unsupported("seed", seed, "an integer"))
        self.texts, self.dataset, self.split, self.text_column = texts, dataset, split, text_column
        self.tokens, self.inputs = tokens, inputs
        self.num_samples, self.sequence_length, self.batch_size = num_samples, sequence_length, batch_size
        self.device = None if device is None else str(device)
        self.checkpoint_dir = None if checkpoint_dir is None else str(checkpoint_dir)
        self.seed = seed

    @property
    def source(self) -> str | None:
        """Which of "texts", "dataset", "tokens" and "inputs" is given; None for a config read from a checkpoint that does
        not name its text."""
        return next((name for name in _SOURCES if getattr(self, name) is not None), None)

    def __eq__(self, other) -> bool:
        """Whether the descriptions (`to_dict`) are the same; texts and tokens are not compared."""
        return type(other) is type(self) and other.to_dict() == self.to_dict()

    def __repr__(self) -> str:
        return f"CalibrationConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """What describes it, JSON-able: without the texts or tokens themselves, the device and the folder."""
        return {name: getattr(self, name) for name in _SAVED}
