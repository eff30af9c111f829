"""`save`, `load`, `send` and `receive` of a `PagedCache`: to a file, and to another process."""

import os
from multiprocessing.connection import Connection

import torch

from hf_efficient.cache import persistence, transfer
from hf_efficient.cache.stores.offload import Offload


class MovesMixin:
    """The methods of a `PagedCache` that carry it away and take it in."""

    def save(self, path: str | os.PathLike, model: torch.nn.Module | None = None) -> None:
        """Writes the blocks in use to one safetensors file, atomically.

        model: the model that filled this cache. `load` then refuses other weights and adapters, else only other
            configs.

        Raises ValueError when the cache is empty.
        """
        persistence.save(self, path, model)

    @classmethod
    def load(cls, path: str | os.PathLike, model, *, offload: Offload | None = None) -> "MovesMixin":
        """Reads the cache that `save` wrote, onto the devices of `model`; `generate()` continues from it.

        Args:
            model: the model, or its config: then pages are on the CPU and weights are not checked.
            offload: as in `PagedCache`.

        Raises ValueError naming the file when it is truncated or altered, or belongs to another model, dtype or format.
        Nothing in a file is executed.
        """
        return persistence.load(cls, path, model, offload)

    def send(self, connection: Connection | int, model: torch.nn.Module | None = None) -> None:
        """Sends the blocks in use, layer by layer, to a process that calls `receive`. Returns when they have arrived.

        connection: one end of a `multiprocessing.Pipe()` or of a socket of `multiprocessing.connection`; or the rank of
            a process of `torch.distributed`, with gloo.
        model: the model that filled this cache. `receive` then refuses other weights and adapters, else only other
            configs.

        Raises ValueError when the cache is empty or the receiver refuses it, and ConnectionError when the receiver
        stops.
        """
        transfer.send(self, connection, model)

    def receive(self, connection: Connection | int, model) -> None:
        """Fills this empty cache with what another process sends; `generate()` continues from it.

        Papers: Splitwise (https://arxiv.org/abs/2311.18677) and DistServe (https://arxiv.org/abs/2401.09670), where one
        process reads the prompts and another one writes the answers.

        connection: as in `send`. Nothing that is received is executed.
        model: the model that continues, on whose devices the pages are stored; or its config: then they are on the CPU,
            and weights and dtype are not checked.

        Raises ValueError, before a page is sent, when the pages are of another model, dtype, block size or format, or
        do not fit into a pool of fixed size or the free memory, and for a cache that holds tokens or has `eviction` or
        `prefix_cache`. Raises ConnectionError when the sender stops, and closes a pipe that is left in the middle. The
        cache is empty after an error.
        """
        transfer.receive(self, connection, model)
