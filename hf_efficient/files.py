"""Atomic writes: everything is written under a temporary hidden name and renamed when it is whole.

A process that is killed leaves what was there before, the whole of the new, or nothing that a reader takes for either.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_WEIGHTS = re.compile(r"(?P<stem>.+?)(?P<shard>(?:-[0-9a-f]{8})?-\d{5}-of-\d{5})?\.safetensors")
_INDEX = re.compile(r"(?P<stem>.+?)\.safetensors\.index(?P<variant>\..+)?\.json")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REPLACED = "replaced"  # in a scratch folder: the only copy of files that are being replaced


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """A path to write a file to, in the folder of `path`, which it replaces when the block ends without an error."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with _naming(path):
            yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `output` when the block ends without an error. Links are followed.

    Raises:
        OSError: `output` is there then, and not empty.
    """
    output = output.resolve()
    with _scratch(output.parent, output.name) as scratch:
        yield scratch
        scratch.chmod(0o755)
        if output.is_dir():
            output.rmdir()
        scratch.rename(output)


@contextlib.contextmanager
def atomic_files(folder: Path, entry: str) -> Iterator[Path]:
    """A folder to write files into, which replace those in `folder` when the block ends without an error.

    `entry` is the file that readers open first. The old one leaves before any other file changes, and the new one comes
    last, so that no reader takes files of both.
    """

    def order(written: list[str], present: list[str]) -> tuple[list[str], list[str]]:
        leaving = sorted(set(written) & set(present), key=lambda name: (name != entry, name))
        return leaving, sorted(written, key=lambda name: (name == entry, name))

    with _replacing(folder, order) as new:
        yield new


@contextlib.contextmanager
def atomic_checkpoint(folder: Path) -> Iterator[Path]:
    """A folder to write a checkpoint into, which replaces the one of the same name ("model", or "model.fp16" of a
    variant) in `folder` when the block ends without an error. Other files of `folder` stay. An error leaves `folder`
    as it was.

    Names change in this order:

    1. the entry points of the old checkpoint (`model.safetensors`, `model.safetensors.index.json`) leave the folder;
    2. its shards leave, its other files are replaced, and the new shards arrive, under names that the folder lacked;
    3. the new entry point arrives.

    A process that is killed before 1 leaves the old checkpoint, one that is killed after 3 the new one. Between them
    `from_pretrained` finds no entry point and says so; the files of both lie whole in a hidden folder `.saving-*`.
    """

    def order(written: list[str], present: list[str]) -> tuple[list[str], list[str]]:
        stems = {_checkpoint(name)[0] for name in written if _checkpoint(name)}
        leaving = [name for name in present if _checkpoint(name) and _checkpoint(name)[0] in stems]
        arriving = sorted(written, key=lambda name: (_is_entry_point(name), _is_shard(name)))
        return sorted(leaving, key=_is_shard), arriving

    with _replacing(folder, order, _rename_shards) as new:
        yield new


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike) -> Iterator[None]:
    """Inside, no other process is inside for `folder`, which is made where it is missing, and removed at the end where
    it was missing and is empty. A process that is killed leaves no lock. Windows, and file systems without locks, let
    several in.

    Raises:
        ValueError: another process is inside.
    """
    folder = Path(folder)
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    opened = None if fcntl is None else os.open(folder, os.O_RDONLY)
    try:
        if opened is not None:
            _lock(opened, folder)
        yield
    finally:
        if not existed:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()
        if opened is not None:
            os.close(opened)


def _lock(opened: int, folder: Path) -> None:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is in use by another process: wait for it, or give another folder") from None
    except OSError:  # the file system has no locks
        pass


@contextlib.contextmanager
def _scratch(folder: Path, prefix: str) -> Iterator[Path]:
    """A new hidden folder in `folder`, removed at the end unless it was renamed or holds the only copy of something."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{prefix}-", dir=folder))
    try:
        with _naming(folder):
            yield scratch
    finally:
        if not (scratch / _REPLACED).exists():
            shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of a disk without room name `path`: Python's and safetensors' name nothing."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        found = re.search(r"serializing.*\(os error (\d+)\)", str(error))
        code = int(found[1]) if found else getattr(error, "errno", None)
        if code not in _NO_ROOM or getattr(error, "filename", None) is not None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


@contextlib.contextmanager
def _replacing(folder: Path, order: Callable, prepare: Callable = lambda new, present: None) -> Iterator[Path]:
    """A scratch folder inside `folder` (renames must not cross a file system) whose files are moved to `folder`.

    Args:
        order: (names written, names present in `folder`) -> (names that leave `folder`, names that arrive), each in
            order.
        prepare: called before it with the scratch folder and the names present.
    """
    folder = folder.resolve()  # of a link whose target is missing, too
    existed = folder.is_dir()
    try:
        with _scratch(folder, "saving") as scratch:
            new = scratch / "new"
            new.mkdir()
            yield new
            prepare(new, os.listdir(folder))
            _move(folder, new, scratch / _REPLACED, *order(os.listdir(new), os.listdir(folder)))
    finally:
        if not existed and folder.is_dir() and not os.listdir(folder):
            folder.rmdir()


def _move(folder: Path, new: Path, replaced: Path, leaving: list[str], arriving: list[str]) -> None:
    """Moves the files `leaving` from `folder` to the new folder `replaced`, then those `arriving` from `new` to
    `folder`. An error puts everything back. `replaced` is removed at the end."""
    undo = []

    def move(source: Path, destination: Path) -> None:
        os.rename(source, destination)
        undo.append((destination, source))

    replaced.mkdir()
    try:
        for name in leaving:
            move(folder / name, replaced / name)
        for name in arriving:
            place = folder / name
            if place.is_dir():
                move(place, replaced / name)
            elif place.exists():  # replaced, never absent: a folder without its config is read as something else
                shutil.copy2(place, replaced / name)
                undo.append((replaced / name, place))
                os.replace(new / name, place)
                continue
            move(new / name, place)
    except BaseException:
        for source, destination in reversed(undo):
            os.replace(source, destination)
        shutil.rmtree(replaced, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _checkpoint(name: str) -> tuple[str, bool] | None:
    """(the checkpoint that the file `name` belongs to, whether it is a shard); None of a file that holds no weights."""
    if index := _INDEX.fullmatch(name):
        return index["stem"] + (index["variant"] or ""), False
    weights = _WEIGHTS.fullmatch(name)
    return weights and (weights["stem"], weights["shard"] is not None)


def _is_shard(name: str) -> bool:
    return bool(_checkpoint(name) and _checkpoint(name)[1])


def _is_entry_point(name: str) -> bool:
    """Whether `from_pretrained` finds the weights by `name`: an index, or weights in one file."""
    return bool(_checkpoint(name)) and not _is_shard(name)


def _rename_shards(new: Path, present: list[str]) -> None:
    """Gives the shards in `new` other names, in the index too, where `present` has one of theirs: a reader of the old
    index finds an old shard or none, never a new one."""
    shards = [name for name in os.listdir(new) if _is_shard(name)]
    if not set(shards) & set(present):
        return
    token = secrets.token_hex(4)
    names = {name: re.sub(r"(-\d{5}-of-\d{5}\.safetensors)$", rf"-{token}\1", name) for name in shards}
    for name in filter(_INDEX.fullmatch, os.listdir(new)):
        index = json.loads((new / name).read_text(encoding="utf-8"))
        index["weight_map"] = {key: names[shard] for key, shard in index["weight_map"].items()}
        (new / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, other in names.items():
        os.rename(new / name, new / other)


def why_not_new(output: Path) -> str | None:
    """Why `new_folder(output)` would fail at the end, as the rest of a sentence that begins with the output's name;
    None where it would not. Folders are made and removed to find out."""
    try:
        output = output.resolve()
        if output.is_dir():
            if any(output.iterdir()):
                return "exists already: give a new or an empty folder"
            if output == Path.cwd() or os.path.ismount(output):
                kind = "the current folder" if output == Path.cwd() else "a mount point"
                return f"is {kind}, which cannot be replaced: give a new folder in it"
        elif os.path.lexists(output):
            return "exists already: give a new or an empty folder"
        return why_not_writable(output)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def why_not_writable(output: Path) -> str | None:
    """Why nothing can be written in the folder of `output`, which need not exist, as in `why_not_new`; or None."""
    output = output.absolute()
    parent = nearest_folder(output)
    try:
        if parent == output.parent:
            tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=parent).cleanup()
        else:
            with tempfile.TemporaryDirectory(prefix=".parents-", dir=parent) as scratch:
                below = Path(scratch) / output.relative_to(parent)
                below.parent.mkdir(parents=True)
                tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=below.parent).cleanup()
    except OSError as error:
        return f"cannot be written in {parent}: {error.strerror or error}; give another place"
    return None


def nearest_folder(output: Path) -> Path:
    """The nearest parent of `output` that exists."""
    return next(parent for parent in output.absolute().parents if os.path.lexists(parent))
