"""Sends steps from rank 0 to the other ranks: the packed inputs of a pass, as bytes.

All ranks compute the same batch over the same block ids. So rank 0 packs the batch once
(`packing`), sends the bytes to each rank over a socket, and computes its own part. The other ranks
send no answers, because the sums in the layers synchronise all ranks. When rank 0 exits, its
sockets close, and the other ranks exit too.
"""

import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.model import packing
from engine.model.packing import PackingShape, Tables
from engine.worker.batch import Row

HEADER = struct.Struct("<7IQ")  # fields of a `PackedStep`, and the number of the bytes that follow


class PackedStep(NamedTuple):
    """The inputs of one pass over the target or the draft model."""

    model: int  # 0: the target, 1: the draft
    shape: PackingShape
    num_kept: int  # number of wanted logits; the rest of `keep` is padding
    row_len: int  # number of tokens to which each row is padded; 0: no padding
    memory: np.ndarray  # [num_bytes] uint8: the inputs, placed by `packing.plan(shape)`


def packed(  # noqa: PLR0913 - all but three have names at the call
    model: int,
    rows: Sequence[Row],
    keep: Sequence[int],
    *,
    shape: PackingShape,
    row_len: int | None,
    tables: Tables,
    block_size: int,
) -> PackedStep:
    """Returns the packed inputs of a pass over `rows`. Wanted are logits of the tokens whose
    indices are in `keep`.
    """
    plan = packing.plan(shape)
    memory = np.empty(plan.num_bytes, dtype=np.uint8)
    inputs = packing.arrays(memory, plan)
    packing.fill(inputs, rows, keep, tables=tables, block_size=block_size, row_len=row_len)
    return PackedStep(model, shape, len(keep), row_len or 0, memory)


def bare_shape(rows: Sequence[Row], keep: Sequence[int], block_size: int) -> PackingShape:
    """Returns the sizes of a pass without padding."""
    width = max(-(-row.end // block_size) for row in rows)
    return PackingShape(len(rows), sum(len(row.token_ids) for row in rows), len(keep), width)


class StepFeed:
    """Rank 0's side of the connections: a socket for each other rank."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """The timeouts of the sockets limit how far a rank may lag behind."""
        self._sockets = sockets

    def send(self, step: PackedStep) -> None:
        """Sends a step to all ranks. Raises OSError if a rank has exited or hangs."""
        fields = (step.model, *step.shape, step.num_kept, step.row_len)
        header = HEADER.pack(*fields, step.memory.nbytes)
        for each in self._sockets:
            each.sendall(header)
            each.sendall(step.memory)

    def close(self) -> None:
        """Closes the sockets, so that the other ranks exit."""
        for each in self._sockets:
            each.close()


class StepChannel:
    """The side of another rank: its connection to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> PackedStep | None:
        """Waits for the next step. Returns None if rank 0 has exited."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        model, *shape, num_kept, row_len, num_bytes = HEADER.unpack(header)
        memory = self._read(num_bytes)
        if memory is None:
            return None
        array = np.frombuffer(memory, np.uint8)
        return PackedStep(model, PackingShape(*shape), num_kept, row_len, array)

    def close(self) -> None:
        """Closes the connection to rank 0."""
        self._connection.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        """Reads `num_bytes` bytes. Returns None if the connection ends first."""
        memory = bytearray(num_bytes)
        rest = memoryview(memory)
        while rest:
            count = self._connection.recv_into(rest)
            if count == 0:
                return None
            rest = rest[count:]
        return memory
