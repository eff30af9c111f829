"""The texts of a training: windows to learn from, written by a model where none are given, and those held out."""

from collections.abc import Mapping, Sequence, Set

import torch

from hf_efficient.calibration.data import check_place, load_tokens
from hf_efficient.calibration.own_text import own_tokens
from hf_efficient.compression.stored_text import stored_text
from hf_efficient.configs import CalibrationConfig
from hf_efficient.configs.checks import is_collection_of


HELD_OUT, MOST_HELD_OUT = 20, 8  # one window in so many is held out, and at most so many


def read_windows(texts, tokenizer, length: int, writer=None, folder=None, seed: int = 0) -> torch.Tensor:
    """int64 [windows, length] of what `recover` takes as texts.

    Args:
        writer: for texts=None, and a `CalibrationConfig` without a source, the model that writes the text.
        folder: keeps the text that was written, and it is taken from there another time.

    Raises:
        ValueError: too little text, none and no writer, or a folder with text of another writer.
    """
    if texts is None:
        texts = CalibrationConfig(sequence_length=length, seed=seed)
    if isinstance(texts, CalibrationConfig):
        check_place("texts", texts)
        return _written(texts, writer, folder) if texts.source is None else load_tokens(texts, tokenizer)
    if isinstance(texts, torch.Tensor):
        return CalibrationConfig(tokens=texts).tokens
    if not is_collection_of(texts, str) or isinstance(texts, (Mapping, Set)):
        raise ValueError(f"texts={texts!r:.40} is not supported: it must be a list of texts, at least one")
    if tokenizer is None:
        raise ValueError("texts are given and no tokenizer: give one, or int64 tokens [windows, length]")
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"the texts have {len(ids)} tokens: a window has sequence_length={length}")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def split_windows(windows: Sequence) -> tuple[Sequence, Sequence]:
    """Windows or answers to learn from, and the last ones, which are held out: none of fewer than `HELD_OUT`."""
    count = min(len(windows) // HELD_OUT, MOST_HELD_OUT)
    return windows[: len(windows) - count], windows[len(windows) - count :]


def _written(config: CalibrationConfig, writer, folder) -> torch.Tensor:
    if writer is None:
        raise ValueError("no text is given, and no model that could write it")
    arguments = {name: getattr(config, name) for name in ("num_samples", "sequence_length", "seed", "own_text")}
    return stored_text(folder, "own_text", writer, arguments, lambda: {"tokens": own_tokens(writer, config)})["tokens"]
