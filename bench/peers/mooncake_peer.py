"""Mooncake's transfer engine over tcp, for `baton bench kv`.

    PYTHON bench/peers/mooncake_peer.py

Memory is registered once. A pull is a `batch_transfer_sync_read` of the requested blocks, in calls
of at most 1,024 descriptors, because a call with 4,096 fails.
"""

import os
import sys
import time
from importlib.metadata import distributions
from typing import Any

from driver import drive, stdout_for_answers  # type: ignore[import-not-found]
from kv_memory import PoolMemory, TransferEnd, fill  # type: ignore[import-not-found]

HOST = "127.0.0.1"
SOURCE_SEED = 4
MAX_DESCRIPTORS = 1024


class Mooncake(TransferEnd):  # type: ignore[misc]
    """One end of a transfer: the source or the sink."""

    def __init__(self) -> None:
        super().__init__()
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self._engine = TransferEngine()
        _succeed("initialize", self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        self._target = ""
        self._address = 0
        self.facts: dict[str, object] = {"version": _version(), "ways": [""]}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Allocates memory, fills it with random bytes, and registers it."""
        self._open(pool_bytes)
        fill(self.memory.array, SOURCE_SEED)
        target = f"{HOST}:{self._engine.get_rpc_port()}"
        return {"source": {"target": target, "address": self.memory.address}}

    def open_sink(
        self, pool_bytes: int, block_sizes: list[int], source: dict[str, Any]
    ) -> dict[str, object]:
        """Allocates and registers memory."""
        self._open(pool_bytes)
        self._target, self._address = source["target"], source["address"]
        return {}

    def pull(
        self, block_bytes: int, pulls: list[list[list[int]]], offers: list[None], way: str
    ) -> dict[str, object]:
        """Reads the blocks of each pull. Addresses are computed before the clock starts."""
        return {"seconds": [self._read(block_bytes, there, here) for there, here in pulls]}

    def _open(self, pool_bytes: int) -> None:
        self.memory = PoolMemory(pool_bytes)
        status = self._engine.register_memory(self.memory.address, pool_bytes)
        _succeed("register_memory", status)

    def _read(self, block_bytes: int, there: list[int], here: list[int]) -> float:
        sources = [self._address + block * block_bytes for block in there]
        sinks = [self.memory.address + block * block_bytes for block in here]
        calls = [
            (sinks[i : i + MAX_DESCRIPTORS], sources[i : i + MAX_DESCRIPTORS])
            for i in range(0, len(sinks), MAX_DESCRIPTORS)
        ]
        sizes = [block_bytes] * MAX_DESCRIPTORS
        read = self._engine.batch_transfer_sync_read
        begin_s = time.perf_counter()
        for to, of in calls:
            _succeed("batch_transfer_sync_read", read(self._target, to, of, sizes[: len(to)]))
        return time.perf_counter() - begin_s


def _succeed(what: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{what} returned {status}")


def _version() -> str:
    found = (d for d in distributions() if d.name.startswith("mooncake-transfer-engine"))
    return next((d.version for d in found), "unknown")


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    drive(Mooncake, sys.stdin, out)
    os._exit(0)  # ends at once, because the engine's threads may outlive the interpreter


if __name__ == "__main__":
    main()
