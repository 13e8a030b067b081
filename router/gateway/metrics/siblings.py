"""Gateway processes that share a port, and what each tells the others that it has counted.

The port gives a connection to any of them, and so a scrape of /metrics: that one asks all others.
Each listens on a Unix socket of its own, `<directory>/<process>`, in a directory that only their
user can enter, and tells whoever connects, and nothing else. One that is gone, or takes too long,
is left out; a scrape never fails of it.
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
    """One process among those whose sockets are in `directory`."""

    def __init__(self, directory: Path, process: str) -> None:
        self.process = process
        self.own: Callable[[], list[Metric]] = list  # what this one has counted
        self._directory = directory

    async def open(self) -> None:
        """Begins to tell the others."""
        path = self._directory / self.process
        path.unlink(missing_ok=True)  # of one that died
        self._server = await asyncio.start_unix_server(self._answer, path)

    async def close(self) -> None:
        """Tells no more."""
        self._server.close()
        (self._directory / self.process).unlink(missing_ok=True)

    async def ask(self) -> list[list[Metric]]:
        """What each of the others has counted, of those that answer."""
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
        log.info("gateway process %s does not tell: %s", path.name, error or type(error).__name__)
        return None
