"""Tensors of device layouts, kept in a folder for later processes, which map them instead of packing weights again.

`$HF_EFFICIENT_LAYOUT_CACHE` names the folder; without it nothing is kept. A file there belongs to one checkpoint, to
the formats and dtypes that its weights are loaded with and to a tier (`tiers.py`). It is a safetensors file, never a
pickle. It may be deleted at any time, also while a process has it mapped. It is made anew where it is missing, damaged
or of another time: its key says what the checkpoint's files were (headers, sizes, times of change) and which sources
wrote it.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from hf_efficient.files import atomic_write
from hf_efficient.kernels.native import compiler, tiers


logger = logging.getLogger(__name__)

VARIABLE = "HF_EFFICIENT_LAYOUT_CACHE"
_DTYPES = {torch.uint8: "U8", torch.int32: "I32", torch.bfloat16: "BF16", torch.float32: "F32"}  # safetensors' words
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
    if not taken.is_dir():
        raise ValueError(f"${VARIABLE} is {name!r}: {taken} is no folder; name a folder, or drop the variable")
    return path


class LayoutCache:
    """The kept tensors of one checkpoint. Where nothing is to be kept, it makes every tensor and writes none.

    Args:
        files: the safetensors files of the checkpoint; none: nothing is kept.
        weights: all that says how the weights of those files become layouts, besides the sources of this package.
    """

    def __init__(self, files: Iterable[str], weights: Iterable[str]):
        self.path, self._key, self._opened, self._names = None, None, None, frozenset()
        self._taken, self._is_new, self._module, self._count = {}, False, "", 0
        where, files = folder(), sorted(os.path.realpath(file) for file in files)
        if where is None or not files:
            return
        name = _hash(*files, tiers.tier().name, torch.__version__, *weights)[:24]
        self.path, self._key = where / f"layouts-{name}.safetensors", _hash(*map(_state, files), _sources())
        if not self.path.exists():
            return
        try:
            opened = safe_open(str(self.path), framework="pt")
            if (opened.metadata() or {}).get("key") == self._key:
                self._opened, self._names = opened, frozenset(opened.keys())
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
        """Writes the file unless it held every tensor. A folder that cannot be written gets a warning."""
        if self._is_new:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self.path) as partial:  # several processes may make it at once
                    _write(partial, self._taken, self._key)
            except OSError as reason:
                logger.warning(f"layouts are not kept in {self.path.parent} (${VARIABLE}): {reason}")
        self._taken, self._opened, self._is_new = {}, None, False


def _hash(*parts: str | bytes) -> str:
    return hashlib.sha256(b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)).hexdigest()


def _state(file: str) -> bytes:
    """What changes with the content of a safetensors file: its header, its size, and when it was changed, which only
    the system sets."""
    with open(file, "rb") as opened:
        header = opened.read(int.from_bytes(opened.read(8), "little"))
        found = os.fstat(opened.fileno())
    return header + repr((found.st_size, found.st_mtime_ns, found.st_ctime_ns)).encode()


@functools.cache
def _sources() -> str:
    """Of the sources that say what a layout is."""
    rooms = compiler.SOURCES.parent / "linear", compiler.SOURCES.parent.parent / "formats"
    texts = [path.read_bytes() for room in rooms for path in sorted(room.glob("*.py"))]
    return _hash(compiler.sources_hash(), *texts)


def _write(path: Path, tensors: dict[str, torch.Tensor], key: str) -> None:
    """A safetensors file in which no line of codes lies across two cache lines."""
    order = sorted(tensors, key=lambda name: [tensors[name].nbytes % size != 0 for size in (_LINE, _LINE // 2)])
    header, end = {"__metadata__": {"key": key}}, 0
    for name in order:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(tensors[name].contiguous().view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())  # renamed before its content is on disk, it could hold zeros after a power cut
