"""An attacker in a process of its own: `python -m bench.hostile.attacker NAME TIMES URL GRPC`.

It makes the bytes of an assault ready, tells its parent, and waits for the command to begin. Its
answer to that has the number of requests by how they ended.
"""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from urllib.parse import urlsplit

import uvloop

from bench.common.waiting import pause
from bench.hostile.assaults import ASSAULTS, Assault, GrpcMessage
from bench.processes.driven import tell_parent
from engine.net.grpc_library import grpc

LOW_PRIORITY = 10  # the server and the honest clients come first
TIMEOUT_S = 60.0
OPTIONS = (("grpc.max_send_message_length", -1),)


async def _send(url: str, request: bytes, reads_after_s: float) -> str:
    """Sends one request on a connection of its own. Returns its status, or why it has none."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with closing(writer):
                writer.write(request)
                await pause(reads_after_s)  # what comes meanwhile fills buffers
                line = (await reader.readline()).split()
                await reader.read()
        return line[1].decode() if len(line) > 1 else "closed"
    except TimeoutError:
        return "left"
    except OSError:
        return "closed"


async def _call(address: str, message: GrpcMessage) -> str:
    """Sends one message on a connection of its own. Returns the name of its status."""
    metadata = () if message.key is None else (("authorization", f"Bearer {message.key}"),)
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.unary_unary(message.path)(message.data, metadata=metadata, timeout=TIMEOUT_S)
        return str((await call.code()).name)


async def _assault(assault: Assault, url: str, address: str) -> Counter[str]:
    """Sends everything, `at_once` requests and as many messages at a time."""
    ends: Counter[str] = Counter()
    requests, messages = iter(assault.requests), iter(assault.messages)

    async def send(waiting: Iterable[bytes]) -> None:
        for request in waiting:
            ends[await _send(url, request, assault.reads_after_s)] += 1

    async def call(waiting: Iterable[GrpcMessage]) -> None:
        for message in waiting:
            ends[await _call(address, message)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(assault.at_once):
            group.create_task(send(requests))
            group.create_task(call(messages))
    return ends


def main(name: str, times: str, url: str, address: str) -> None:
    """Waits for the command, carries out the assault and prints the requests by status."""
    os.nice(LOW_PRIORITY)
    assault = ASSAULTS[name](int(times))
    tell_parent({"ready": {}})
    if sys.stdin.buffer.readline():
        tell_parent({"ends": dict(uvloop.run(_assault(assault, url, address)))})


if __name__ == "__main__":
    main(*sys.argv[1:])
