"""The block tables and lengths of a paged cache on a device, in tensors that stay where they are.

Kernels, compiled forwards and captured CUDA graphs read them. The host writes them and never waits for the device.
"""

from collections.abc import Sequence

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool
from hf_efficient.cache.bookkeeping.tensors import lazy_zeros, to_device


class DeviceTables:
    """The tensors that kernels read in one forward.

    block_table: int32 [B, blocks], the blocks of each sequence; entries beyond its tokens are undefined. As wide as a
        pool of fixed size, else a power of two.
    cache_seqlens: int32 [B], tokens of each sequence before the forward, without dropped ones.
    dropped: int32 [B], dropped tokens; None in a pool that has dropped none.
    query_starts: int32 [B + 1], where the new tokens of each sequence begin, in a forward of packed sequences.
    columns: int64 [], the sequence length before the forward, as transformers counts it.
    """

    def __init__(self, pool: BlockPool, starts: list[int], columns: int, device):
        width = pool.num_blocks or 1 << max(map(len, pool.tables)).bit_length()
        longest = max(map(len, pool.tables))
        sequences = [table + [-1] * (longest - len(table)) for table in pool.tables]
        with torch.inference_mode(False):  # inference tensors cannot be written to outside of inference mode
            used = to_device(sequences, torch.int32, device).view(len(sequences), longest)
            self.block_table = lazy_zeros(used, len(sequences), width)
            self.block_table[:, :longest] = used
            self.cache_seqlens = to_device(starts, torch.int32, device)
            self.query_starts = torch.zeros(len(starts) + 1, dtype=torch.int32, device=device)
            self.columns = torch.full((), columns, dtype=torch.int64, device=device)
            self.dropped = None
            self._set_dropped(pool.dropped)
            self._position_ids: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # and the offsets of new tokens

    def fits(self, pool: BlockPool) -> bool:
        sequences, width = self.block_table.shape
        return sequences == len(pool.tables) and max(map(len, pool.tables)) <= width

    def _set_dropped(self, dropped: Sequence[int]) -> None:
        if self.dropped is not None or any(dropped):
            self.dropped = to_device(dropped, torch.int32, self.columns.device)

    def update(
        self, changes: list[tuple[int, int, int]], starts: list[int], columns: int, dropped: Sequence[int] = ()
    ) -> None:
        """Writes the next forward's state in place. changes: from `BlockPool.table_changes`."""
        device = self.block_table.device
        if changes:
            sequences, numbers, blocks = to_device(list(zip(*changes)), torch.int64, device)
            self.block_table.index_put_((sequences, numbers), blocks.int())
        self._set_dropped(dropped)
        if device.type == "cpu":  # numpy writes few numbers faster
            self.cache_seqlens.numpy()[:], self.columns.numpy()[()] = starts, columns
            return
        self.cache_seqlens.copy_(to_device(starts, torch.int32, device))
        self.columns.fill_(columns)

    def position_ids(self, width: int) -> torch.Tensor:
        """int64 [B, width], the positions of `width` new tokens of each sequence, in the same tensor at every call."""
        if width not in self._position_ids:
            with torch.inference_mode(False):
                positions = self.columns.new_empty(len(self.cache_seqlens), width)
                self._position_ids[width] = positions, torch.arange(width, device=self.columns.device)
        positions, offsets = self._position_ids[width]
        seen = self.cache_seqlens if self.dropped is None else self.cache_seqlens + self.dropped
        return torch.add(seen[:, None], offsets, out=positions)
