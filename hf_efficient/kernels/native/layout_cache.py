"""Tensors of device layouts, kept in a folder for later processes, which map them instead of packing weights again.

`$HF_EFFICIENT_LAYOUT_CACHE` names the folder; without it nothing is kept. A file there belongs to one checkpoint, to
the formats and dtypes that its weights are loaded with and to a tier (`tiers.py`). It is a safetensors file, never a
pickle. It may be deleted at any time, also while a process has it mapped. It is made anew where it is missing, damaged
or of another time: its key says what the checkpoint's files were before they were read (headers, sizes, times of
change, samples) and which sources wrote it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hf_efficient.files import atomic_write
from hf_efficient.kernels.native import compiler, tiers


logger = logging.getLogger(__name__)

VARIABLE = "HF_EFFICIENT_LAYOUT_CACHE"
_DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.bfloat16: "BF16", torch.float32: "F32"}  # safetensors' words
_SAMPLES, _SAMPLE = 64, 256  # of a checkpoint's file, and bytes of each
_DAY = 86400  # seconds: no process writes a file for longer
_LINE = 64  # bytes of a cache line, and of a vector that the kernels read
_CURRENT: ContextVar["LayoutCache | None"] = ContextVar("layout cache", default=None)


def kept(shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The next tensor of the layouts that are being derived, `shape` of `dtype`: the one that an earlier process kept,
    else `make()`."""
    cache = _CURRENT.get()
    return make() if cache is None or dtype not in _DTYPES else cache._take(shape, dtype, make)


def folder() -> Path | None:
    """Where layouts are kept; None: nowhere. Raises ValueError where that is no folder and cannot become one."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name).expanduser()
    taken = next((part for part in (path, *path.absolute().parents) if os.path.lexists(part)), path)
    if not os.path.isdir(taken):
        raise ValueError(f"${VARIABLE} is {name!r}: {taken} is no folder; name a folder, or drop the variable")
    return path


def state(files: Iterable[str]) -> str | None:
    """What changes with the content of the safetensors `files` of a checkpoint. It is taken before they are read: later
    others may stand under their names. None: nothing is to be kept, or, after a warning, a file cannot be read.

    Raises:
        ValueError: that of `folder`.
    """
    if folder() is None:
        return None
    files = sorted(os.path.realpath(file) for file in files)
    try:
        return _hash(*map(_state, files)) if files else None
    except OSError as reason:
        logger.warning(f"layouts of {os.path.dirname(files[0])} are not kept (${VARIABLE}): {reason}")
        return None


class LayoutCache:
    """The kept tensors of one checkpoint. Where nothing is to be kept, it makes every tensor and writes none.

    Args:
        files: the safetensors files of the checkpoint.
        before: their `state` before they were read; None: nothing is kept. Nor is it where they have changed since.
        weights: all that says how the weights of those files become layouts, besides the sources of this package.
    """

    def __init__(self, files: Iterable[str], before: str | None, weights: Iterable[str]):
        self.path, self._metadata, self._opened, self._names = None, {}, None, frozenset()
        self._taken, self._is_new, self._module, self._count = {}, False, "", 0
        files, where = sorted(files), folder()
        now = None if before is None else state(files)
        if where is None or now is None:
            return
        checkpoint = os.path.dirname(os.path.abspath(files[0]))
        if now != before:
            logger.warning(f"{checkpoint} was changed while it was loaded: its layouts are not kept (${VARIABLE})")
            return
        name = _hash(*sorted(map(os.path.realpath, files)), tiers.tier().name, torch.__version__, *weights)[:24]
        self.path = where / f"layouts-{name}.safetensors"
        self._metadata = {"key": _hash(before, _sources()), "checkpoint": checkpoint.encode(errors="replace").decode()}
        self._open()

    def _open(self) -> None:
        try:
            if not _is_trusted(self.path):
                raise PermissionError("it belongs to another user")
            opened = safe_open(str(self.path), framework="pt")
            if (opened.metadata() or {}).get("key") == self._metadata["key"]:
                self._opened, self._names = opened, frozenset(opened.keys())
        except FileNotFoundError:
            pass
        except (SafetensorError, OSError) as reason:
            logger.warning(f"{self.path} holds no layouts that can be read, they are made anew: {reason}")

    @contextlib.contextmanager
    def of(self, module: str) -> Iterator[None]:
        """Inside, `kept` is about the layouts of `module`, a full name."""
        self._module, self._count = module, 0
        token = _CURRENT.set(self if self.path is not None else None)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def _take(self, shape, dtype, make):
        name = f"{self._module}:{self._count}"
        self._count += 1
        tensor = self._opened.get_tensor(name) if name in self._names else None
        if tensor is None or tuple(tensor.shape) != tuple(shape) or tensor.dtype is not dtype:
            tensor, self._is_new = make(), True
        self._taken[name] = tensor
        return tensor

    def finish(self) -> None:
        """Writes the file unless it holds every tensor. A folder that cannot be written gets a warning."""
        if self._is_new:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _remove_partial_files(self.path.parent)
                _write(self.path, self._taken, self._metadata)
            except OSError as reason:
                logger.warning(f"layouts are not kept in {self.path.parent} (${VARIABLE}): {reason}")
        self._taken, self._opened, self._is_new = {}, None, False


def _hash(*parts: str | bytes) -> str:
    parts = (part.encode(errors="surrogatepass") if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _state(file: str) -> bytes:
    """The header of a safetensors file, its size, when it was changed, which only the system sets, and samples: not
    every file system knows when a file was changed."""
    with open(file, "rb") as opened:
        found = os.fstat(opened.fileno())
        parts = [opened.read(min(int.from_bytes(opened.read(8), "little"), found.st_size))]
        for index in range(_SAMPLES):
            opened.seek(max(found.st_size - _SAMPLE, 0) * index // (_SAMPLES - 1))
            parts.append(opened.read(_SAMPLE))
    return b"".join(parts) + repr((found.st_size, found.st_mtime_ns, found.st_ctime_ns)).encode()


def _is_trusted(path: Path) -> bool:
    """Whether this user or root owns a file. Where users have no numbers, everybody is trusted."""
    return not hasattr(os, "geteuid") or path.stat().st_uid in (0, os.geteuid())


@functools.cache
def _sources() -> str:
    """Of the sources that say what a layout is and how its tensors are named, and of the package's version, which
    stands in one. All modules of the package would take ten times as long to read."""
    rooms = *(compiler.SOURCES.parents[1] / name for name in (".", "formats", "kernels/linear")), compiler.SOURCES
    paths = [path for room in rooms for path in sorted(room.glob("*.py"))]
    deriving = Path(find_spec("hf_efficient.integrations.loaded_layouts").origin)
    return _hash(compiler.sources_hash(), *(path.read_bytes() for path in (*paths, deriving)))


def _remove_partial_files(where: Path) -> None:
    """Those of processes that were killed."""
    for path in where.glob(".layouts-*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DAY:
                path.unlink()


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file in which no line of codes lies across two cache lines. An equal file, of a process that was
    faster, stays."""
    order = sorted(tensors, key=lambda name: [tensors[name].nbytes % size != 0 for size in (_LINE, _LINE // 2)])
    header, end = {"__metadata__": metadata}, 0
    for name in order:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    text = len(text).to_bytes(8, "little") + text
    if _begins_with(path, text, len(text) + end):
        return
    with atomic_write(path) as partial, open(partial, "wb") as file:  # several processes may make it at once
        file.write(text)
        for name in order:
            file.write(tensors[name].contiguous().view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())  # renamed before its content is on disk, it could hold zeros after a power cut


def _begins_with(path: Path, text: bytes, size: int) -> bool:
    """Whether a file that may be trusted has `size` bytes, of which `text` are the first."""
    try:
        with open(path, "rb") as file:
            return _is_trusted(path) and path.stat().st_size == size and file.read(len(text)) == text
    except OSError:
        return False
