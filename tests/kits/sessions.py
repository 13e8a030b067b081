"""A session server for tests that echoes frames."""

from engine.net.sessions import Line, SessionClient
from engine.net.trust import Secret

SECRET = Secret("token")
DEADLINE_S = 120.0


async def echo(line: Line) -> None:
    async for frame in line:
        await line.send(frame)


async def check_echo(client: SessionClient) -> None:
    await client.send(b"a")
    assert await client.receive() == b"a"
