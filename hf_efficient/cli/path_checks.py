"""Paths given to commands, checked before anything is loaded."""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hf_efficient.cli.options import option_name


def check_output(option: str, given: str, replaced: bool = True) -> Path:
    """The path of a folder that the command makes; checks that it can be written.

    Args:
        replaced: True: an empty folder of that name is replaced (`files.new_folder`). False: it is written into.

    Raises:
        ValueError: it holds something, or cannot be made.
    """
    from hf_efficient.files import why_not_new

    path = check_path(option, given)
    if not replaced and is_there(given, Path.is_dir) and not any(path.iterdir()):
        return check_folder(option, given)
    if reason := why_not_new(path):
        raise ValueError(f"{option} {given} {reason}")
    return path


def check_folder(option: str, given: str) -> Path:
    """The path of a folder that may hold files already. Raises ValueError where no others can be written there."""
    from hf_efficient.files import nearest_folder

    path = check_path(option, given)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {given} is a file; give a folder")
    try:
        tempfile.TemporaryFile(dir=nearest_folder(path / "file")).close()
    except OSError as error:
        raise ValueError(f"{option} {given} cannot be written: {error.strerror}; give another folder") from None
    return path


def check_outside(options: argparse.Namespace, *names: str) -> None:
    """Raises ValueError where a path among the options `names`, which is written before the output is, is the output or
    lies in it: then that could not become a new folder, and an interrupted command not go on."""
    output = Path(options.output).resolve()
    for name in names:
        given = getattr(options, name)
        if given is not None and check_path(option_name(name), given).resolve().is_relative_to(output):
            raise ValueError(f"{option_name(name)} {given} lies in --output {options.output}: give another place")


def check_file(option: str, given: str, keys: Iterable[str]) -> Path:
    """The path of a JSON file that the command writes, in place of an earlier result, which has `keys`.

    Raises:
        ValueError: another file is there, or it cannot be written.
    """
    from hf_efficient.files import why_not_writable

    path = check_path(option, given)
    if path.is_dir():
        raise ValueError(f"{option} {given} is a folder; give a file")
    if path.exists() and not _is_result(path, keys):
        raise ValueError(f"{option} {given} exists already and is no result of this command: give another file")
    if reason := why_not_writable(path):
        raise ValueError(f"{option} {given} {reason}")
    return path


def check_report(option: str, given: str, names: tuple[str, ...], keys: Iterable[str]) -> Path:
    """`check_folder` for a report, the files `names`. They replace those of an earlier one, whose first has `keys`.

    Raises:
        ValueError: other files of these names are there, or the folder cannot be written.
    """
    folder = check_folder(option, given)
    taken = [name for name in names if (folder / name).exists()]
    if taken and not _is_result(folder / names[0], keys):
        raise ValueError(f"{option} {given}: {taken[0]} exists already and is no result of this command: give another")
    return folder


def _is_result(path: Path, keys: Iterable[str]) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and set(keys) <= set(content)


def check_text_file(option: str, given: str) -> str:
    """The content of a text file. Raises ValueError where there is none, or it is not UTF-8."""
    path = check_path(option, given)
    if not path.is_file():
        raise ValueError(f"{option} {given}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {given} is no text in UTF-8: {error}") from None


def check_path(option: str, given: str) -> Path:
    """`given` as a path. Raises ValueError for an empty one and for one with a zero byte."""
    if not given or "\0" in given:
        raise ValueError(f"{option} {given!r} is no path")
    return Path(given)


def is_there(given: str, kind) -> bool:
    """Whether `kind` (Path.is_file or Path.is_dir) holds for the path `given`."""
    try:
        return kind(Path(given))
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False
