"""Steps on their way from rank 0 to the other ranks: the packed inputs of a pass, as bytes.

All ranks compute the same batch over the same block ids. So rank 0 packs it once (`packing`), sends
the bytes to each rank over a socket, and computes its own part. Nothing is answered: the ranks meet
in the sums of the layers. When rank 0 ends, the sockets end, and the ranks with them.
"""

import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.model import packing
from engine.model.packing import PackingShape, Tables
from engine.worker.batch import Row

HEADER = struct.Struct("<5IQ")  # the model, the shape, and the number of bytes that follow


class PackedStep(NamedTuple):
    """The inputs of one pass."""

    model: int  # 0: the target, 1: the draft
    shape: PackingShape
    memory: np.ndarray  # [num_bytes] uint8, as `packing.plan(shape)` places the inputs


def packed(
    model: int, rows: Sequence[Row], keep: Sequence[int], *, tables: Tables, block_size: int
) -> PackedStep:
    """Packs a pass over `rows` that wants logits of the tokens whose indices are in `keep`."""
    width = max(-(-row.end // block_size) for row in rows)
    num_tokens = sum(len(row.token_ids) for row in rows)
    shape = PackingShape(len(rows), num_tokens, len(keep), width)
    plan = packing.plan(shape)
    memory = np.empty(plan.num_bytes, dtype=np.uint8)
    inputs = packing.arrays(memory, plan)
    packing.fill(inputs, rows, keep, tables=tables, block_size=block_size)
    return PackedStep(model, shape, memory)


class StepFeed:
    """Rank 0's end: a socket for each of the other ranks."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        """Their timeouts bound how long a rank may be behind."""
        self._sockets = sockets

    def send(self, step: PackedStep) -> None:
        """Sends a step to all ranks. Raises OSError if one has ended or hangs."""
        header = HEADER.pack(step.model, *step.shape, step.memory.nbytes)
        for each in self._sockets:
            each.sendall(header)
            each.sendall(step.memory)

    def close(self) -> None:
        """Ends the other ranks."""
        for each in self._sockets:
            each.close()


class StepChannel:
    """Another rank's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> PackedStep | None:
        """Waits for the next step, as long as rank 0 lives. None: rank 0 has ended."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        model, *shape, num_bytes = HEADER.unpack(header)
        memory = self._read(num_bytes)
        if memory is None:
            return None
        return PackedStep(model, PackingShape(*shape), np.frombuffer(memory, np.uint8))

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        """Reads so many bytes; None if the connection ends before."""
        memory = bytearray(num_bytes)
        rest = memoryview(memory)
        while rest:
            count = self._connection.recv_into(rest)
            if count == 0:
                return None
            rest = rest[count:]
        return memory
