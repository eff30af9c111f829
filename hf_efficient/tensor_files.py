"""Safetensors files that are read one tensor at a time, into memory of its own and not into a mapping of the file, and
tensors that lie in mapped files. Used where a file is larger than memory."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


DTYPES = {  # safetensors' words -> torch's
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, not read yet.

    Args:
        offset, size: its bytes in the file.
    """

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self, most: int | None = None) -> torch.Tensor:
        """The tensor in new memory; with `most` its first bytes, uint8, and at most as many.

        Raises:
            OSError: the file ends before the tensor does.
        """
        size = self.size if most is None else min(most, self.size)
        data = torch.empty(size, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            view, filled = memoryview(data.numpy()), 0
            while filled < size:
                count = file.readinto(view[filled:])
                if not count:
                    raise OSError(f"{self.path} ends inside the tensor {self.key}")
                filled += count
        return data if most is not None else data.view(self.dtype).view(self.shape)


def stored_tensors(path) -> dict[str, StoredTensor]:
    """Key -> tensor, of the safetensors file `path`.

    Raises:
        ValueError: it is no (whole) safetensors file, or has a dtype that torch lacks.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file that can be read: {error}") from None
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for key, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path} holds {key} as {entry['dtype']}, which torch has no dtype for")
        start, stop = entry["data_offsets"]
        place = 8 + length + start, stop - start
        found[key] = StoredTensor(path, key, DTYPES[entry["dtype"]], tuple(entry["shape"]), *place)
    return found


def check_whole(path) -> None:
    """Raises ValueError where `path`, a file of the progress of a run, is no whole safetensors file, and OSError where
    it is missing."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, or give another folder") from None


def shards(index) -> list[str]:
    """Names of the files that the `index` of a checkpoint, a model.safetensors.index.json, names.

    Raises:
        ValueError: it is no index, or names something else than safetensors files beside it.
    """
    try:
        names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from None
    for name in names or {None}:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}: weight_map must name safetensors files beside it")
    return sorted(names)


def mapped(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the file `path`, which is made where it is missing: what is written to the tensor is in the file, and
    the system takes its memory back when it needs it."""
    count = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of all bytes of `tensor`, of any shape, dtype and device: several times as fast as a digest."""
    return zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())
