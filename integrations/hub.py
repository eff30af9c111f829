"""Publishes what this package writes, with a card: on the Hub, or in a local folder in its place."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from hf_efficient.files import new_folder, why_not_new
from hf_efficient.integrations import evaluation_card, folder_card, folder_kinds, folder_record, model_card


UPLOADED = (".safetensors", ".gguf", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md", ".png")
CARD = "README.md"
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def push(
    folder: str | os.PathLike,
    repo: str,
    *,
    base_model: str | None = None,
    licence: str | None = None,
    report: str | os.PathLike | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool | None = None,
    commit_message: str = "Upload a model compressed with hf_efficient",
) -> str:
    """Uploads what is in `folder` with a card, in one commit, which also deletes the weights that the new
    ones replace. `folder` is not changed.

    Args:
        folder: what `save_pretrained` of a compressed model wrote, or a command of `hf-efficient`: also exports, pruned
            models, draft heads and context predictors. A .gguf file, too.
        repo: Hub id, or a folder to make: a path that begins with "/", "." or "~". A folder needs no network; it must
            not exist or be empty.
        base_model: what was compressed, a Hub id, or a folder whose name alone is published. By default what the
            report or the card in `folder` names, as `hf-efficient quantize` records it there.
        licence: identifier of the Hub, such as "apache-2.0". By default that of the card in `folder`, else that of
            the base model's card, where they can be read.
        report: a report.json that measured this folder (`hf-efficient run --model BASE --config FOLDER --output
            FOLDER`), by default the one in `folder`. What `hf-efficient evaluate FOLDER --card` measured is told, too.
        private, token, revision, create_pr, commit_message: as in huggingface_hub's `create_repo` and
            `create_commit`; a folder takes no `private`, `revision` and `create_pr`. The token is by default the one
            that `hf auth login` stored or HF_TOKEN holds.

    Returns:
        The URL of the commit, or the folder.

    Raises:
        ValueError: the folder is of no kind that is published, holds what must not be, the report is of other
            weights, or the card would not say what was compressed and replace one that does; before anything is
            written.
        OSError: the Hub cannot be reached, or refuses.
    """
    given = Path(folder)
    kind = folder_kinds.recognise(given)
    folder, files = (given.parent, [given.name]) if given.is_file() else (given, _files(given))
    local = is_folder(repo)
    if local:
        asked = {"private": private, "revision": revision, "create_pr": create_pr}
        for option, value in asked.items():
            if value is not None:
                raise ValueError(f"{option}={value!r} is of the Hub, and {repo} is a folder: leave it out")
        target = Path(repo).expanduser()
        if reason := why_not_new(target):
            raise ValueError(f"{target} {reason}")
        name = target.absolute().name
    else:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(repo)
        name = repo.rpartition("/")[2]
    card, base_model = _card(given, kind, name, None if local else repo, base_model, licence, report, token)
    if base_model is None:
        if given.is_dir():
            _check_replaced(folder, folder / CARD)
        if not local:
            _check_replaced(folder, _published_card(repo, revision, token))
    if local:
        _copy(folder, files, card, target)
        return str(target)
    options = {"revision": revision, "create_pr": create_pr, "commit_message": commit_message}
    return _commit(folder, files, card, repo, private, token, **options)


def push_to_hub(self, repo_id, **options) -> str:
    """`push_to_hub` of a compressed model: `push` of what its `save_pretrained` writes, with the arguments of both
    transformers and `push`. The tokenizer is pushed by itself."""
    max_shard_size = options.pop("max_shard_size", "50GB")
    description, tags = options.pop("commit_description", None), options.pop("tags", None)
    if description or tags:
        raise ValueError("commit_description and tags are not supported: the card has its own tags")
    if "base_model" not in options and not options.get("report"):
        made_here = not self.hf_quantizer.pre_quantized
        options["base_model"] = (self.name_or_path if made_here else recorded_base_model(self.name_or_path)) or None
    with tempfile.TemporaryDirectory() as scratch:
        self.save_pretrained(scratch, max_shard_size=max_shard_size)
        return push(scratch, repo_id, **options)


def is_folder(repo: str) -> bool:
    """Whether `repo` is a path and no Hub id."""
    return repo.startswith((".", "~")) or Path(repo).is_absolute()


def record_base_model(folder: Path, name: str, base_model: str) -> None:
    """Writes a card into `folder`, of a model called `name`, that says what was compressed, for `push` to tell."""
    licence = _licence(base_model, network=False)
    card = model_card.origin(name, base_model, licence if licence and model_card.is_licence(licence) else None)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")


def recorded_base_model(folder: str | os.PathLike) -> str | None:
    """What the card or the record of `folder` says was compressed: a Hub id, or "path/to/" and the name of a folder;
    None where neither is there or says so."""
    card = Path(folder) / CARD
    base, name = _metadata(card, "base_model"), _metadata(card, model_card.FOLDER_FIELD)
    if base is None and name is None and (record := folder_record.read(Path(folder))) is not None:
        return record["base_model"]
    return base or (f"path/to/{name}" if name else None)


def weights_sha256(folder: Path) -> str:
    """One hash of the names and contents of the weight files in `folder`."""
    total = hashlib.sha256()
    paths = sorted(path for ending in folder_kinds.WEIGHTS for path in folder.glob(f"*{ending}"))
    for path in logging.tqdm(paths, desc="hashing", unit="file", leave=False):
        own = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                own.update(part)
        total.update(f"{path.name} {own.hexdigest()}\n".encode())
    return total.hexdigest()


def read_folder(folder: Path) -> tuple[dict, "model_card.CompressionConfig"]:
    """(config.json, the compression it describes) of a checkpoint.

    Raises ValueError where there is none of this package.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: the folder holds no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return config, model_card.read_config(config.get("quantization_config"))
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _files(folder: Path) -> list[str]:
    """Names of the files to publish, relative to `folder`, once all of them may be."""
    root, names = folder.resolve(), []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts) or name in (CARD, "model_card.md"):
            continue
        if not path.resolve().is_relative_to(root):
            raise ValueError(f"{folder}: {name!r} leads out of the folder")
        if path.is_dir():
            continue
        if path.suffix not in UPLOADED or not name.isprintable():
            raise ValueError(
                f"{folder}: {name!r} is no file that is published: allowed are {', '.join(UPLOADED)}, so neither "
                "pickles nor code"
            )
        names.append(name)
    weights = [name for name in names if name.endswith(folder_kinds.WEIGHTS)]
    for name in weights:
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(folder / name, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{folder}: {name!r} is not whole: {error}") from None
    if not weights:
        raise ValueError(f"{folder}: the folder holds no file of weights: {' or '.join(folder_kinds.WEIGHTS)}")
    named = {shard for name in names if name.endswith(_INDEX) for shard in _named_by(folder, name, set(weights))}
    if stray := [name for name in weights if _SHARD.search(name) and name not in named]:
        raise ValueError(f"{folder}: {stray[0]!r} is a part of a checkpoint, and no *{_INDEX} names it")
    return names


def _named_by(folder: Path, index: str, weights: set[str]) -> set[str]:
    """The files of weights that the index at `index` names, relative to `folder`. Raises ValueError where it is none,
    or one of them is not among `weights`."""
    try:
        files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
        named = {(Path(index).parent / file).as_posix() for file in files}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: {index!r} is no index of safetensors files: {error!r}") from None
    if missing := sorted(named - weights):
        raise ValueError(f"{folder}: {index!r} names {missing[0]!r}, which is no weight file of the folder")
    return named


def _card(given: Path, kind, name: str, repo_id, base_model, licence, report, token) -> tuple[str, str | None]:
    """(the card, the base model it names)"""
    record, content, variant = folder_record.read(given), None, None
    if kind.name == folder_kinds.OURS:
        content, variant = _measurement(given, report)
    elif report is not None:
        raise ValueError(f"report {report}: `hf-efficient run` does not measure {given}; `hf-efficient evaluate` may")
    if content is not None:
        if base_model not in (None, content["model"]):
            raise ValueError(f"base_model={base_model!r}, but the report compares with {content['model']!r}")
        base_model = content["model"]
    base_model = base_model or recorded_base_model(given)
    if licence is None:
        licence = _metadata(given / CARD, "license")
    if licence is None and base_model is not None:
        licence = _licence(base_model, repo_id is not None, token)
    measured = evaluation_card.read(given, weights_sha256(given)) if given.is_dir() else None
    if kind.name == folder_kinds.OURS:
        config, compression = read_folder(given)
        architecture = (config.get("architectures") or ["AutoModel"])[0]
        options = {"repo_id": repo_id, "architecture": architecture, "base_model": base_model, "licence": licence}
        options |= {"commands": record and record["commands"], "content": content, "variant": variant}
        options |= {"evaluated": measured is not None}
        card = model_card.render(name, compression, **options)
    else:
        place = repo_id or (given.name if given.is_file() else "path/to/this folder")
        card = folder_card.render(name, kind, record, place, base_model, licence)
    if measured is not None:
        card = evaluation_card.add_to(card, measured, name)
    return card, base_model


def _check_replaced(folder: Path, card: Path | None) -> None:
    """Raises ValueError where `card` says more of a model's origin than the one that would replace it, which says
    nothing."""
    if card is None or not card.is_file():
        return
    base = _metadata(card, "base_model")
    if base is None and model_card.NO_ORIGIN in card.read_text(encoding="utf-8"):
        return
    place = f"the card in {folder}" if card == folder / CARD else "the card in the repository"
    raise ValueError(
        f"{folder} does not record what was compressed, and its card would replace {place}: give "
        f"base_model={base or 'owner/name'!r}"
    )


def _published_card(repo: str, revision: str | None, token) -> Path | None:
    """The card that the repository has now."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(repo, CARD, revision=revision, token=token))
    except (EntryNotFoundError, HfHubHTTPError):  # no repository, branch or card
        return None


def _measurement(folder: Path, report) -> tuple[dict | None, dict | None]:
    """(the report, its variant that measured the weights in `folder`), or nothing where there is no report."""
    path = folder / "report.json" if report is None else Path(report)
    if report is None and not path.exists():
        return None, None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"report {path}: {getattr(error, 'strerror', None) or error}") from None
    model_card.check_report(content)
    digest = weights_sha256(folder)
    for variant in content["variants"]:
        if variant.get("weights_sha256") == digest:
            return content, variant
    raise ValueError(
        f"report {path} did not measure the weights in {folder}: `hf-efficient run --model BASE --config {folder} "
        f"--output {folder}` does, or remove it for a card without figures"
    )


def _metadata(path: Path, field: str) -> str | None:
    """A field of the metadata of the card at `path`, where there is one and the field is a text."""
    return _field(path, field) if path.is_file() else None


def _field(card: Path | str, field: str, token: str | bool | None = None) -> str | None:
    import yaml
    from huggingface_hub import ModelCard

    try:
        value = ModelCard.load(card, token=token, ignore_metadata_errors=True).data.to_dict().get(field)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"the card of {card} cannot be read: {error}") from None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else None


def _licence(base_model: str, network: bool, token: str | bool | None = None) -> str | None:
    """The licence that the base model's card names, None where it cannot be read."""
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if not model_card.is_hub_id(base_model):
        return _metadata(Path(base_model) / CARD, "license")
    try:
        return _field(base_model, "license", token) if network else None
    except (EntryNotFoundError, HfHubHTTPError):
        return None


def _copy(folder: Path, files: list[str], card: str, target: Path) -> None:
    with new_folder(target) as new:
        for name in logging.tqdm(files, desc="copying", unit="file", leave=False):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, new / name)
        (new / CARD).write_text(card, encoding="utf-8")


def _commit(folder: Path, files: list[str], card: str, repo: str, private, token, revision, **options) -> str:
    """One commit with everything in it; returns its URL. options: of `create_commit`.

    Raises:
        OSError: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # of the HTTP client, which is not the same package in every release of huggingface_hub
    connection_errors = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    try:
        api = HfApi(token=token)
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision is not None and not options["create_pr"]:
            api.create_branch(repo, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(name, os.fspath(folder / name)) for name in files]
        operations.append(CommitOperationAdd(CARD, card.encode()))
        replaced = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
        for name in api.list_repo_files(repo, revision=revision):
            if "/" not in name and name.endswith(replaced) and name not in files:
                operations.append(CommitOperationDelete(name))  # transformers might read it instead
        return api.create_commit(repo, operations, revision=revision, **options).commit_url
    except connection_errors as error:
        raise OSError(f"the Hub did not take {repo}: {error}") from error
