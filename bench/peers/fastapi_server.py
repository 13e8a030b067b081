# mypy: ignore-errors
"""A server of streams, as servers are usually written: FastAPI, and a pydantic model for each
chunk.

    PYTHON bench/peers/fastapi_server.py

The server runs on uvicorn with uvloop and httptools, in its own environment. Requests and protocol
are the same as in `uvloop_server.py`.
"""

import asyncio
import json
import socket
import sys
import threading

import fastapi
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel


class Delta(BaseModel):
    """The text that a chunk adds."""

    role: str | None = None
    content: str | None = None


class PeerChunkChoice(BaseModel):
    """The only choice of a chunk."""

    index: int
    delta: Delta
    logprobs: dict | None = None
    finish_reason: str | None = None


class Chunk(BaseModel):
    """One event of the stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[PeerChunkChoice]


class Message(BaseModel):
    """One message of the prompt."""

    role: str
    content: str


class PeerChatBody(BaseModel):
    """The body of a request."""

    model: str
    messages: list[Message]
    max_tokens: int
    stream: bool = False
    user: str = "0"


app = FastAPI()


@app.post("/v1/chat/completions")
async def answer(body: PeerChatBody, _: Request) -> StreamingResponse:
    """Streams tokens at the pace that the body requests."""

    async def events():
        for i in range(body.max_tokens):
            if i:
                await asyncio.sleep(float(body.user))  # noqa: TID251
            choice = PeerChunkChoice(index=0, delta=Delta(content=" token"))
            chunk = Chunk(id="chatcmpl-0", created=1700000000, model=body.model, choices=[choice])
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def main() -> None:
    """Serves requests until standard input is closed."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="error")
    server = uvicorn.Server(config)

    def stop_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop_with_parent, daemon=True).start()
    ready = {"port": sock.getsockname()[1], "version": fastapi.__version__}
    print(json.dumps({"ready": ready}), flush=True)  # noqa: T201
    server.run(sockets=[sock])


if __name__ == "__main__":
    main()
