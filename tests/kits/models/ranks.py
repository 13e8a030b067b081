"""Runners that span several processes: rank 0 in this process, other ranks in waiting processes."""

import multiprocessing
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.model.parallel.group import RankGroup
from engine.model.parallel.steps import StepChannel, StepFeed
from engine.model.runner import TorchRunner
from engine.worker.ranks import RankPlace

TIMEOUT_S = 120.0


class RankProcesses:
    """The processes of all ranks but 0. Tests reuse the processes, because a start takes seconds.

    The processes are forked from a process that has imported this file and torch once.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._idle: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def take(self, num: int) -> list[Connection]:
        while len(self._idle) < num:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._idle.append(here)
        taken, self._idle = self._idle[:num], self._idle[num:]
        return taken

    def give_back(self, taken: Sequence[Connection]) -> None:
        self._idle += taken

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        for process in self._processes:
            process.join(TIMEOUT_S)
            assert not process.is_alive(), "a rank goes on"

    @contextmanager
    def runner(
        self, path: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, **options: object
    ) -> Iterator[TorchRunner]:
        """Opens a runner of `path` on tp x pp ranks; options go to `TorchRunner`."""
        place = RankPlace(0, tp, pp, ep)
        connections = self.take(place.size - 1)
        pairs = [socket.socketpair() for _ in connections]
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = Path(folder) / "ranks"
            for rank, (connection, (_, theirs)) in enumerate(
                zip(connections, pairs, strict=True), start=1
            ):
                own = msgspec.structs.replace(place, rank=rank)
                connection.send((path, own, rendezvous, theirs, options))
                theirs.close()
            runner = TorchRunner(
                path,
                group=RankGroup(place, rendezvous),
                feed=StepFeed([ours for ours, _ in pairs]),
                **options,
            )
            runner.open()
            try:
                yield runner
            finally:
                runner.close()
                for connection in connections:
                    assert connection.poll(TIMEOUT_S), "a rank does not end"
                    said = connection.recv()
                    assert said == "done", said
        self.give_back(connections)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            path, place, rendezvous, steps, options = connection.recv()
        except EOFError:
            return
        try:
            runner = TorchRunner(path, group=RankGroup(place, rendezvous), **options)
            runner.open()
            runner.follow(StepChannel(steps))
            runner.close()
            steps.close()
        except BaseException as error:
            connection.send(repr(error))
            raise
        connection.send("done")


FP32 = {"weights": WeightFormat.FP32, "kv_format": KVFormat.FP32, "block_size": 4}
