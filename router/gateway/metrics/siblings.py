"""Shares metrics between gateway processes on one port.

The kernel gives a scrape of /metrics to any of them, and that process asks all others. Each listens
on a Unix socket of its own, `<directory>/<process>`, in a directory that only their user can enter.
It sends its metrics to each connection and reads nothing. A process that is gone or too slow is
left out, and the scrape goes on.
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


class Siblings:
    """One gateway process; all sockets are in `directory`."""

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self.own: Callable[[], list[Metric]] = list  # returns the metrics of this process
        self._directory = directory

    async def open(self) -> None:
        """Starts to serve this process's metrics."""
        path = self._directory / self.process
        path.unlink(missing_ok=True)  # of a process that died
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Stops serving metrics."""
        self._server.close()
        (self._directory / self.process).unlink(missing_ok=True)

    async def ask(self) -> list[list[Metric]]:
        """The metrics of all other processes that answer in time."""
        names = sorted(path.name for path in self._directory.iterdir())
        others = [self._directory / name for name in names if name != self.process]
        answers = await asyncio.gather(*map(_ask, others))
        return [answer for answer in answers if answer is not None]

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_metrics(self.own()))
        writer.close()


async def _ask(path: Path) -> list[Metric] | None:
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return decode_metrics(await reader.read())
            finally:
                writer.close()
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        log.info(
            "gateway process %s sends no metrics: %s", path.name, error or type(error).__name__
        )
        return None
