"""The channels that send a paged cache: a connection of `multiprocessing`, or a process of `torch.distributed`."""

import json
from multiprocessing import ProcessError
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


_MESSAGE_BYTES = 1 << 26  # of a message at most: the block tables in it grow with the cache
_PIECE_BYTES = 1 << 22  # of a tensor, in one write to a pipe


class Channel:
    """Sends messages, as JSON, and the bytes of tensors: nothing is pickled. Raises ConnectionError where the other end
    is gone or says what was not expected."""

    broken: tuple[type[Exception], ...]  # what the transport raises

    def write(self, data: torch.Tensor) -> None:
        """Sends uint8 [n]."""
        raise NotImplementedError

    def read(self, data: torch.Tensor) -> None:
        """Fills uint8 [n]."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Called when this end gives up in the middle, so that the other one does not wait."""

    def put(self, message: dict) -> None:
        content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self.put_tensor(torch.tensor([len(content)]))
        self.put_tensor(content)

    def get(self) -> dict:
        self.get_tensor(length := torch.zeros(1, dtype=torch.int64))
        if not 0 < length.item() <= _MESSAGE_BYTES:
            raise ConnectionError(f"the other end announced a message of {length.item()} bytes")
        self.get_tensor(content := torch.empty(length.item(), dtype=torch.uint8))
        message = json.loads(content.numpy().tobytes())
        if not isinstance(message, dict):
            raise ConnectionError("the other end sent a message of another kind")
        return message

    def put_tensor(self, tensor: torch.Tensor) -> None:
        """tensor: of any dtype, on the CPU."""
        self._guarded(self.write, tensor.contiguous())

    def get_tensor(self, tensor: torch.Tensor) -> None:
        """Fills `tensor`, contiguous and on the CPU."""
        self._guarded(self.read, tensor)

    def _guarded(self, move, tensor: torch.Tensor) -> None:
        try:
            move(tensor.reshape(-1).view(torch.uint8))
        except self.broken as error:
            raise ConnectionError(f"the other end went away: {str(error) or type(error).__name__}") from error


class Pipe(Channel):
    """A connection of `multiprocessing`: a pipe, or a socket."""

    broken = EOFError, OSError, ProcessError

    def __init__(self, connection: Connection):
        if not (connection.readable and connection.writable):
            raise ValueError(
                "connection: must be readable and writable, as both ends answer: multiprocessing.Pipe(duplex=True)"
            )
        self._connection = connection

    def write(self, data: torch.Tensor) -> None:
        for piece in data.split(_PIECE_BYTES):
            self._connection.send_bytes(piece.numpy())

    def read(self, data: torch.Tensor) -> None:
        for piece in data.split(_PIECE_BYTES):
            if (number := self._connection.recv_bytes_into(piece.numpy())) != len(piece):
                raise OSError(f"{number} bytes came and {len(piece)} were expected")

    def abandon(self) -> None:
        self._connection.close()


class Peer(Channel):
    """Another process of the default group of `torch.distributed`, through gloo."""

    broken = (RuntimeError,)

    def __init__(self, rank: int):
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(f"connection={rank}: a rank needs torch.distributed.init_process_group() first")
        if not 0 <= rank < dist.get_world_size() or rank == dist.get_rank():
            raise ValueError(
                f"connection={rank}: must be the rank of another process, from 0 to {dist.get_world_size() - 1} and "
                f"not {dist.get_rank()}, which is this one"
            )
        if "gloo" not in dist.get_backend():
            raise ValueError(f"connection={rank}: the backend is {dist.get_backend()!r} and must be 'gloo'")
        self._rank = rank

    def write(self, data: torch.Tensor) -> None:
        dist.send(data, self._rank)

    def read(self, data: torch.Tensor) -> None:
        dist.recv(data, self._rank)


def channel_of(connection: Connection | int) -> Channel:
    """The channel through `connection`: the end of a pipe, or a rank. Raises ValueError for anything else."""
    if isinstance(connection, Connection):
        return Pipe(connection)
    if isinstance(connection, int) and not isinstance(connection, bool):
        return Peer(connection)
    raise ValueError(
        f"connection={type(connection).__name__}: must be a multiprocessing.connection.Connection, or the rank of a "
        "process of torch.distributed"
    )
