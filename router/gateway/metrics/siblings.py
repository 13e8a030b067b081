"""Shares metrics and the dashboard's state between gateway processes on one port.

The kernel assigns a connection to any of the processes, and that process queries all other
processes. Each process listens on its own Unix socket, `<directory>/<process>`, in a directory that
only the processes' user can enter. A connection carries one query, which is a line, and the answer
to it. If a process has ended or is too slow, the result is used without its answer.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client.core import Metric

from router.gateway.metrics.families import decode_metrics, encode_metrics

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 1.0
METRICS = "metrics"  # name of the query for metrics


class Siblings:
    """Answers and sends queries for one gateway process. The sockets are in `directory`."""

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self.own: Callable[[], list[Metric]] = list  # returns the metrics of this process
        self.answers: dict[str, Callable[[], bytes]] = {METRICS: lambda: encode_metrics(self.own())}
        self._directory = directory

    async def open(self) -> None:
        """Starts to answer the other processes."""
        path = self._directory / self.process
        path.unlink(missing_ok=True)  # socket left by a dead process
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Stops answering the other processes."""
        self._server.close()
        (self._directory / self.process).unlink(missing_ok=True)

    async def ask(self) -> list[list[Metric]]:
        """Queries all other processes for metrics. Returns the metrics that arrive in time."""
        found = []
        for answer in await self.ask_for(METRICS):
            try:
                found.append(decode_metrics(answer))
            except msgspec.DecodeError as error:
                log.info("a gateway process sends no metrics: %s", error)
        return found

    async def ask_for(self, question: str) -> list[bytes]:
        """Queries all other processes. Returns the answers that arrive in time."""
        names = sorted(path.name for path in self._directory.iterdir())
        others = [self._directory / name for name in names if name != self.process]
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return [answer for answer in answers if answer is not None]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                question = (await reader.readline()).decode().strip()
            answer = self.answers.get(question)
            if answer is not None:
                writer.write(answer())
        except (OSError, TimeoutError, ValueError) as error:
            log.info("a question of a gateway process is not answered: %r", error)
        finally:
            writer.close()


async def _ask(path: Path, question: str) -> bytes | None:
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(f"{question}\n".encode())
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        why = error or type(error).__name__
        log.info("gateway process %s does not answer %s: %s", path.name, question, why)
        return None
