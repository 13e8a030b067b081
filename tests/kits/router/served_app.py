"""An app behind a real listener on loopback, in a thread of the test's process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from router.edge.limits import Book
from router.edge.listener import Listener
from router.gateway.background import BackgroundWork


@contextmanager
def served(app: Any, work: BackgroundWork | None = None) -> Iterator[str]:
    """Serves the app and its background work on a free port. Yields the URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    host, port = sock.getsockname()[:2]
    is_open, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        listener = Listener(app, Book())
        background = work or BackgroundWork()
        await background.open()
        listener.open(sock)
        is_open.set()
        await stop.wait()
        await background.close(1.0)
        await listener.close(0.0, lambda: None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_open.wait(10)
    try:
        yield f"http://{host}:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()
        loop.close()
