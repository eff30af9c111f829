"""A checkpoint of one or two safetensors files as raw bytes, read and written without the package safetensors."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


NUMPY = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "F8_E4M3": "u1", "BOOL": "u1"},
    **{"U8": "u1", "I8": "i1", "U16": "u2", "I16": "i2", "U32": "u4", "I32": "i4", "U64": "u8", "I64": "i8"},
}
FLOATS = ("F64", "F32", "F16", "BF16")


def size_of(dtype: str) -> int:
    return np.dtype(NUMPY[dtype]).itemsize


@dataclass
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> np.ndarray:
        """As the dtype says: floats in float64, integers in int64."""
        words = np.frombuffer(self.data, "<" + NUMPY[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":
            return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.dtype == "F8_E4M3":
            return e4m3(words)
        return words.astype(np.float64 if self.dtype in FLOATS else np.int64)

    @classmethod
    def of(cls, values: np.ndarray, dtype: str) -> "Tensor":
        """Rounds to `dtype`; integers are cut off at its ends."""
        if dtype == "BF16":
            bits = values.astype(np.float32).view(np.uint32)
            words = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
        elif dtype == "F8_E4M3":
            table = np.nan_to_num(e4m3(np.arange(256, dtype=np.uint8)), nan=np.inf)
            words = np.abs(table - np.nan_to_num(values)[..., None]).argmin(-1).astype(np.uint8)
        elif dtype in FLOATS:
            words = values.astype(NUMPY[dtype])
        else:
            limits = np.iinfo(NUMPY[dtype])
            words = np.nan_to_num(np.rint(values.astype(np.float64))).clip(limits.min, float(limits.max) * (1 - 2e-16))
            words = words.astype(NUMPY[dtype])
        return cls(dtype, tuple(values.shape), np.ascontiguousarray(words).tobytes())


def e4m3(words: np.ndarray) -> np.ndarray:
    sign, exponent, mantissa = 1.0 - 2 * (words >> 7), (words >> 3 & 15).astype(int), words & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return sign * np.where((exponent == 15) & (mantissa == 7), np.nan, values)


@dataclass
class Checkpoint:
    """config: that of config.json; shards: how many files the tensors are dealt out to."""

    config: dict
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    shards: int = 1

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        data = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data[start:end])
        return cls(json.loads((folder / "config.json").read_text()), tensors, metadata)

    def copy(self) -> "Checkpoint":
        return copy.deepcopy(self)

    def files(self) -> dict[str, bytes]:
        """Name -> bytes of everything in the folder."""
        names = sorted(self.tensors)
        config = {"config.json": json.dumps(self.config).encode()}
        if self.shards == 1:
            return {**config, "model.safetensors": self._file(names)}
        cut = [names[index :: self.shards] for index in range(self.shards)]
        shards = {f"model-{i + 1:05}-of-{self.shards:05}.safetensors": own for i, own in enumerate(cut)}
        index = {"metadata": {}, "weight_map": {name: file for file, own in shards.items() for name in own}}
        files = {file: self._file(own) for file, own in shards.items()}
        return {**config, **files, "model.safetensors.index.json": json.dumps(index).encode()}

    def _file(self, names: list[str]) -> bytes:
        header, start = {"__metadata__": self.metadata} if self.metadata else {}, 0
        for name in names:
            tensor = self.tensors[name]
            offsets = [start, start + len(tensor.data)]
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            start += len(tensor.data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + b"".join(self.tensors[name].data for name in names)
