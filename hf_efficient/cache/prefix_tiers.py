"""The tiers below the pool of a `PrefixCache`: blocks in host memory, and in a file.

Paper: Yu et al., Stateful Large Language Model Serving with Pensieve (https://arxiv.org/abs/2312.05516).
"""

import json
import os
import uuid
import weakref
from pathlib import Path

import torch

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.cache.bookkeeping.prefix_tree import Move, Node
from hf_efficient.cache.bookkeeping.recompute import Rates
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros
from hf_efficient.cache.stores.memory_budget import blocks_in


class PrefixOffload:
    """Keeps the blocks for which the pool of a `PrefixCache` has no room in host memory and on the disk:
    `PrefixCache(model, memory="1GB", offload=PrefixOffload("8GB"))`.

    A block that leaves the pool moves to host memory. The least recently used blocks there move to the disk, and the
    least recently used ones on the disk are dropped. A block comes back, bit for bit, when a prompt begins with it. The
    part of a prompt that exceeds the pool is stored in host memory directly.

    Reading blocks may take longer than computing them. Both speeds are measured. The cost of a token grows with its
    position, so the leading tokens of a prompt are computed again and the rest is read, if that is faster. This is done
    for batches without padding.

    Args:
        host_memory: bytes of host memory, an int or "512MB", "2GiB". Memory is allocated as blocks are written.
        disk: a folder for the blocks beyond that, in one safetensors file, which is deleted with the `PrefixCache`.
        disk_memory: bytes of the file, reserved when the size of a block is known; needs `disk`.

    Raises ValueError for other arguments.
    """

    def __init__(
        self, host_memory: int | str, disk: str | os.PathLike | None = None, disk_memory: int | str | None = None
    ):
        if (disk is None) != (disk_memory is None):
            raise ValueError(
                f"PrefixOffload(disk={disk!r}, disk_memory={disk_memory!r}): give both, the folder and how much may "
                "lie there, or neither"
            )
        self.host_memory = parse_bytes("host_memory", host_memory)
        self.disk = None if disk is None else Path(disk)
        self.disk_memory = None if disk is None else parse_bytes("disk_memory", disk_memory)
        if self.disk is not None and not hasattr(os, "posix_fallocate"):
            raise ValueError(f"disk={str(disk)!r}: this system cannot reserve a file (posix_fallocate): leave it out")
        if self.disk is not None and not self.disk.is_dir():
            raise ValueError(f"disk={str(disk)!r}: must be a folder that exists")

    def sizes(self, block_bytes: int) -> list[int]:
        """Blocks of each tier. Raises ValueError where one holds none, or too many."""
        result = []
        for name in ("host_memory", "disk_memory"):
            if (given := getattr(self, name)) is not None:
                if given < block_bytes:
                    raise ValueError(
                        f"PrefixOffload({name}={given}): a block over all layers takes {block_bytes} bytes"
                    )
                result.append(blocks_in(name, given, given, block_bytes))
        return result


class LowerTiers:
    """Blocks of all layers, each as one run of bytes.

    pools: of each layer, name -> pages [num_blocks, ...], whose blocks these are like. sizes: of `PrefixOffload.sizes`.
    rates: what reading takes is noted there.

    Raises OSError where the disk has no room.
    """

    def __init__(self, offload: PrefixOffload, pools: list[dict[str, torch.Tensor]], sizes: list[int], rates: Rates):
        self._pools, self.rates = pools, rates
        self._widths = [pages[:1].nbytes for layer in pools for pages in layer.values()]
        self.block_bytes = sum(self._widths)
        like = torch.empty(0, dtype=torch.uint8)
        with torch.inference_mode(False):
            self._host = lazy_zeros(like, sizes[0], self.block_bytes)
        self._file = _BlockFile(offload.disk, sizes[1], self.block_bytes) if len(sizes) > 1 else None

    def take(self, pages: list[dict[str, torch.Tensor]], nodes: list[tuple[Node, int]]) -> None:
        """Fills nodes of these tiers from a block each of `pages`, of each layer."""
        if nodes:
            self._put(dict(zip((node for node, _ in nodes), _packed(pages, [block for _, block in nodes]))))

    def take_in(self, moves: list[Move]) -> None:
        """Copies what left the pool, or went from one tier to the next. All is read before anything is written."""
        data = {}
        for tier in (0, 1):
            moved = [move for move in moves if move.from_tier == tier]
            if moved:
                blocks = [move.from_block for move in moved]
                contents = _packed(self._pools, blocks) if tier == 0 else self._read(tier, blocks)
                data.update(zip((move.node for move in moved), contents))
        self._put(data)
        for node in data:
            if node.beginning is not None:
                node.beginning = [{name: x.cpu() for name, x in layer.items()} for layer in node.beginning]

    def give(self, tier: int, blocks: list[int], pages: list[dict[str, torch.Tensor]], destinations: list[int]) -> None:
        """Copies `blocks` of `tier` to the blocks `destinations` of `pages`, of each layer."""
        start = self.rates.clock()
        parts = iter(self._read(tier, blocks).split(self._widths, 1))
        for layer in pages:
            for kind in layer.values():
                content = next(parts).contiguous().view(kind.dtype).reshape(len(blocks), *kind.shape[1:])
                kind.index_copy_(0, torch.tensor(destinations, device=kind.device), content.to(kind.device))
        self.rates.was_read(tier, len(blocks) * self.block_bytes, self.rates.clock() - start)

    def _put(self, data: dict[Node, torch.Tensor]) -> None:
        for tier in (1, 2):
            if nodes := [node for node in data if node.tier == tier]:
                self._write(tier, [node.block for node in nodes], torch.stack([data[node] for node in nodes]))

    def _read(self, tier: int, blocks: list[int]) -> torch.Tensor:
        return self._host[torch.tensor(blocks)] if tier == 1 else self._file.read(blocks)

    def _write(self, tier: int, blocks: list[int], data: torch.Tensor) -> None:
        if tier == 1:
            self._host[torch.tensor(blocks)] = data
        else:
            self._file.write(blocks, data)


def _packed(pages: list[dict[str, torch.Tensor]], blocks: list[int]) -> torch.Tensor:
    """The bytes of blocks of all layers, uint8 [n, bytes of a block] on the CPU."""
    parts = []
    for layer in pages:
        for kind in layer.values():
            chosen = kind.index_select(0, torch.tensor(blocks, device=kind.device))
            parts.append(chosen.cpu().reshape(len(blocks), -1).view(torch.uint8))
    return torch.cat(parts, 1)


class _BlockFile:
    """A safetensors file with the tensor "blocks", uint8 [size, width]. Read and written block by block, and not
    mapped: so a disk without room is an error and not a signal."""

    def __init__(self, folder: Path, size: int, width: int):
        entry = {"blocks": {"dtype": "U8", "shape": [size, width], "data_offsets": [0, size * width]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        self._width, self._start = width, 8 + len(header)
        path = folder / f"prefix-{uuid.uuid4().hex}.safetensors"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._end = weakref.finalize(self, _remove, self._descriptor, path)
        try:
            os.write(self._descriptor, len(header).to_bytes(8, "little") + header)
            os.posix_fallocate(self._descriptor, 0, self._start + size * width)
        except OSError as error:
            self._end()
            raise OSError(
                error.errno, f"PrefixOffload(disk_memory=...): {size * width} bytes: {error.strerror}"
            ) from error

    def read(self, blocks: list[int]) -> torch.Tensor:
        data = torch.empty(len(blocks), self._width, dtype=torch.uint8)
        for block, content in zip(blocks, data.numpy()):
            if os.preadv(self._descriptor, [content], self._start + block * self._width) != self._width:
                raise OSError("the file of a PrefixCache was shortened")
        return data

    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        for block, content in zip(blocks, data.contiguous().numpy()):
            if os.pwrite(self._descriptor, content, self._start + block * self._width) != self._width:
                raise OSError("the file of a PrefixCache took a part of a block")


def _remove(descriptor: int, path: Path) -> None:
    os.close(descriptor)
    path.unlink(missing_ok=True)
