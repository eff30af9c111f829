"""The tokens that calibration runs on: read, tokenized, cut into windows, and checked against the model."""

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_efficient.calibration.own_text import own_tokens
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.integrations.transformers_loading import of_this_call


_SEPARATOR = "\n\n"


def load_tokens(config: CalibrationConfig, tokenizer) -> torch.Tensor:
    """Tokens int64 [num_samples, sequence_length]: documents in random order, without special tokens, joined by blank
    lines and cut into windows that do not overlap.

    Raises:
        ValueError: no text or no tokenizer is given, a file cannot be read as text, or there is too little text.
        ImportError: a dataset of the Hub, without the package `datasets`.
    """
    if config.tokens is not None:
        return config.tokens
    if config.inputs is not None:
        raise ValueError("inputs are given: text is needed here, one of texts, dataset and tokens")
    if config.source is not None and tokenizer is None:
        raise ValueError(f"{config.source} are given and no tokenizer: give one, or CalibrationConfig(tokens=...)")
    wanted, found, text = config.num_samples * config.sequence_length, [], ""
    for document in _documents(config):
        text += document + _SEPARATOR
        # assumes at least 4 characters a token; more is read if that was not enough
        if len(text) >= 4 * (wanted - len(found)):
            found += _encode(tokenizer, text)
            text = ""
        if len(found) >= wanted:
            break
    if len(found) < wanted:
        found += _encode(tokenizer, text.removesuffix(_SEPARATOR))
    if len(found) < wanted:
        windows = len(found) // config.sequence_length
        advice = f"give more text, or num_samples={windows}" if windows else "give more text"
        raise ValueError(
            f"the calibration text has {len(found)} tokens, but num_samples={config.num_samples} windows of "
            f"sequence_length={config.sequence_length} need {wanted}: {advice}"
        )
    return torch.tensor(found[:wanted]).view(config.num_samples, config.sequence_length)


def load_tokenizer(name_or_path: str, files=None):
    """The tokenizer for the calibration text.

    Args:
        name_or_path: of its model.
        files: paths of the weights that the running call of `from_pretrained` found: the tokenizer is that of their
            revision, reached with the arguments of the call. None for one that is reached without arguments.

    Raises:
        ValueError: there is none. The message tells no token.
    """
    from transformers import AutoTokenizer

    place = _place(files) if files else {}
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **place)
    except (OSError, ValueError) as error:
        shown = [argument for argument in ("cache_dir", "revision", "subfolder") if place.get(argument)]
        given = "".join(f", {argument}={place[argument]!r}" for argument in shown)
        raise ValueError(
            f"{name_or_path}{given} has no tokenizer for the calibration text ({error}): "
            "give CalibrationConfig(tokens=...)"
        ) from error


def _place(files) -> dict:
    commit = re.search(r"/snapshots/([0-9a-f]{40})/", Path(files[0]).as_posix())
    return of_this_call() | ({"revision": commit[1]} if commit else {})


def check_place(name: str, config: CalibrationConfig) -> None:
    """Raises ValueError for fields of `config`, the argument `name`, that mean nothing to a model in memory that is not
    compressed block by block."""
    for field in ("device", "checkpoint_dir", "minutes"):
        if (value := getattr(config, field)) is not None:
            raise ValueError(f"{name}: {field}={value!r} is not supported here: it runs where the model is")


def model_inputs(config: CalibrationConfig, tokenizer, model) -> list[dict[str, torch.Tensor]]:
    """The arguments of the model's forward, one dict a batch. The decoder of an encoder-decoder reads the window of the
    encoder, shifted by one token.

    Raises:
        ValueError: what `load_tokens` raises; padded inputs, or values among them that are no tensors; a model that
            reads no text; windows longer than the model has positions; tokens outside its vocabulary.
    """
    if config.inputs is not None:
        for batch in config.inputs:
            _check_batch(batch)
        return config.inputs
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name!r} and not text: give "
            "CalibrationConfig(inputs=[...]), dicts of arguments of its forward"
        )
    tokens = own_tokens(model, config) if config.source is None else load_tokens(config, tokenizer)
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and tokens.shape[1] > positions:
        raise ValueError(f"sequence_length={tokens.shape[1]} is more than the {positions} positions of the model")
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"tokens are between {tokens.min().item()} and {tokens.max().item()}, but {type(model).__name__} has a "
            f"vocabulary of {vocabulary}: they are those of another tokenizer"
        )
    batches = [{"input_ids": batch} for batch in tokens.split(config.batch_size)]
    if model.config.is_encoder_decoder:
        start = getattr(text_config, "decoder_start_token_id", None) or 0
        for batch in batches:
            shifted = batch["input_ids"].roll(1, 1)
            shifted[:, 0] = start
            batch["decoder_input_ids"] = shifted
    return batches


def _check_batch(batch: dict) -> None:
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            form = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"inputs: {name} is {form}: every value must be a tensor that is not empty")
        if name in ("attention_mask", "decoder_attention_mask") and (value == 0).any():
            raise ValueError(f"inputs: {name} holds zeros, and padding would count as data: give rows of one length")


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _documents(config: CalibrationConfig) -> Iterator[str]:
    if config.source is None:
        raise ValueError(
            "calibration needs text and has none: give CalibrationConfig(texts=[...]), "
            "CalibrationConfig(dataset='file.txt') or another of texts, dataset, tokens and inputs"
        )
    if config.texts is not None:
        return _shuffled(config.texts, config.seed)
    path = Path(config.dataset).expanduser()
    if path.suffix == ".txt" and path.is_file():
        return iter([_text_of(path)])
    if path.suffix == ".jsonl" and path.is_file():
        return _shuffled(_json_lines(path, config.text_column), config.seed)
    if path.exists() or path.suffix in (".txt", ".jsonl"):
        problem = "is neither a .txt nor a .jsonl file" if path.exists() else "does not exist"
        raise ValueError(f"dataset={config.dataset!r} {problem}: allowed are such files and dataset ids of the Hub")
    return _hub_documents(config)


def _shuffled(documents: list[str], seed: int) -> Iterator[str]:
    return iter(random.Random(seed).sample(documents, len(documents)))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None


def _json_lines(path: Path, column: str) -> list[str]:
    documents = []
    for number, line in enumerate(_text_of(path).split("\n"), 1):
        if line.strip():
            try:
                documents.append(json.loads(line)[column])
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}:{number} is not a JSON object with the field {column!r}") from None
            if not isinstance(documents[-1], str):
                raise ValueError(f"{path}:{number}: {column!r} is {type(documents[-1]).__name__}, not text")
    return documents


def _hub_documents(config: CalibrationConfig) -> Iterator[str]:
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f"dataset={config.dataset!r}: there is no such file, and a dataset of the Hub needs the package "
            "'datasets': pip install datasets, or give a .txt or .jsonl file"
        )
    from datasets import load_dataset

    name, _, subset = config.dataset.partition(":")
    rows = load_dataset(name, subset or None, split=config.split, streaming=True)
    if rows.column_names and config.text_column not in rows.column_names:
        raise ValueError(f"text_column={config.text_column!r} is not among the columns {rows.column_names} of {name}")
    return (row[config.text_column] for row in rows.shuffle(seed=config.seed))
