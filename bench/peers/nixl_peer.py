"""Bare NIXL over UCX, for `baton bench kv`: the limit of Baton's `nixl` backend.

    PYTHON bench/peers/nixl_peer.py

Descriptors of all blocks are prepared once on both sides. A pull is one READ of the requested
blocks, with a notification for the source. The time of a pull includes creating the request,
because each pull has other blocks. Agents have no progress thread, since that thread would use a
whole core. The sink polls while it waits, and the source polls while it has unread offers.

The ways are UCX's modes of error handling: `peer`, which is the default, and `none`, which may use
more transports.
"""

import os
import sys
import threading
import time
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from driver import drive, stdout_for_answers  # type: ignore[import-not-found]
from kv_memory import PoolMemory, TransferEnd, fill  # type: ignore[import-not-found]

PACKAGES = ("nixl_cu12", "nixl_cu13")
SOURCE_SEED = 3
WAYS = ("peer", "none")
TIMEOUT_S = 30.0


class Agent:
    """A NIXL agent in one mode of error handling, with registered memory and its descriptors."""

    def __init__(self, nixl: Any, name: str, way: str, memory: PoolMemory) -> None:
        config = nixl.nixl_agent_config(backends=[], enable_prog_thread=False)
        self._agent = nixl.nixl_agent(name, config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": way})
        self._memory = memory
        region = (memory.address, len(memory.array), 0, "")
        self._agent.register_memory([region], "DRAM")
        self._prepared: dict[int, tuple[Any, Any]] = {}

    def describe(self) -> dict[str, object]:
        """Returns the metadata that the other end needs for reading."""
        metadata = self._agent.get_agent_metadata()
        return {"metadata": metadata.hex(), "address": self._memory.address}

    def connect(self, source: dict[str, Any], block_sizes: list[int]) -> None:
        """Prepares the descriptors of all blocks on both ends."""
        remote = self._agent.add_remote_agent(bytes.fromhex(source["metadata"]))
        self._agent.make_connection(remote)
        for size in block_sizes:
            self._prepared[size] = (
                self._prepare("NIXL_INIT_AGENT", self._memory.address, size),
                self._prepare(remote, source["address"], size),
            )

    def read(self, block_bytes: int, source_blocks: list[int], blocks: list[int]) -> float:
        """Carries out one READ. Returns its seconds."""
        local, remote = self._prepared[block_bytes]
        here, there = np.array(blocks, np.int32), np.array(source_blocks, np.int32)
        begin_s = time.perf_counter()
        request = self._agent.make_prepped_xfer("READ", local, here, remote, there, b"read")
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        seconds = time.perf_counter() - begin_s
        self._agent.release_xfer_handle(request)
        if state != "DONE":
            raise RuntimeError(f"a READ ended as {state}")
        return seconds

    def drive_reads(self, num_reads: int) -> None:
        """Polls UCX until the sink has notified this number of reads."""
        end_s = time.perf_counter() + TIMEOUT_S
        while num_reads > 0 and time.perf_counter() < end_s:
            num_reads -= sum(map(len, self._agent.get_new_notifs().values()))

    def _prepare(self, agent: str, address: int, block_bytes: int) -> Any:
        num_blocks = len(self._memory.array) // block_bytes
        blocks = np.empty((num_blocks, 3), np.uint64)
        blocks[:, 0] = address + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        blocks[:, 1:] = block_bytes, 0  # offset 1 is the length, offset 2 the device
        return self._agent.prep_xfer_dlist(agent, blocks, "DRAM")


class Nixl(TransferEnd):  # type: ignore[misc]
    """One end of a transfer: the source or the sink."""

    def __init__(self) -> None:
        super().__init__()
        package = next(filter(find_spec, PACKAGES))
        self._nixl = import_module(f"{package}._api")
        self._agents: dict[str, Agent] = {}
        self.facts: dict[str, object] = {"version": version(package), "ways": list(WAYS)}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Allocates memory, fills it with random bytes, and registers it."""
        self._open("source", pool_bytes)
        fill(self.memory.array, SOURCE_SEED)
        return {"source": {way: agent.describe() for way, agent in self._agents.items()}}

    def open_sink(
        self, pool_bytes: int, block_sizes: list[int], source: dict[str, Any]
    ) -> dict[str, object]:
        """Allocates and registers memory, and prepares all descriptors."""
        self._open("sink", pool_bytes)
        for way, agent in self._agents.items():
            agent.connect(source[way], block_sizes)
        return {}

    def offer(self, block_bytes: int, pulls: list[list[int]], way: str) -> dict[str, object]:
        """Polls UCX until the sink has carried out all pulls."""
        target = self._agents[way].drive_reads
        threading.Thread(target=target, args=(len(pulls),), daemon=True).start()
        return {"offers": [None] * len(pulls)}

    def pull(
        self, block_bytes: int, pulls: list[list[list[int]]], offers: list[None], way: str
    ) -> dict[str, object]:
        """Carries out one READ for each pull."""
        agent = self._agents[way]
        return {"seconds": [agent.read(block_bytes, there, here) for there, here in pulls]}

    def _open(self, role: str, pool_bytes: int) -> None:
        self.memory = PoolMemory(pool_bytes)
        self._agents = {way: Agent(self._nixl, f"{role}-{way}", way, self.memory) for way in WAYS}


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    drive(Nixl, sys.stdin, out)
    os._exit(0)  # ends at once, because UCX's clean-up may wait for a peer that has ended


if __name__ == "__main__":
    main()
