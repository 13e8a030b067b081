"""`baton chat`: a terminal client of any OpenAI-compatible server, streaming."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console

from engine.errors import BatonError


class ServerError(BatonError):
    """The server refused a request or the connection broke."""


class ChatClient:
    """Keeps the messages of a conversation, and sends them with each request."""

    def __init__(self, client: httpx.Client, model: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._options = options
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Iterator[str]:
        """Sends a user message and yields the answer in pieces. Raises ServerError."""
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": self._model,
            "messages": self.messages,
            "stream": True,
            **self._options,
        }
        pieces: list[str] = []
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ServerError(error_message(response.read()))
                for line in response.iter_lines():
                    piece = content_of(line)
                    if piece:
                        pieces.append(piece)
                        yield piece
        except httpx.HTTPError as error:
            raise ServerError(f"connection lost: {error}") from error
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def first_model(client: httpx.Client) -> str:
    """Returns the name of the first model that the server lists. Raises ServerError."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(f"no server at {client.base_url}: {error}") from error
    if response.status_code != 200:
        raise ServerError(error_message(response.content))
    return str(response.json()["data"][0]["id"])


def content_of(line: str) -> str:
    """Returns the text in one line of an SSE stream. Raises ServerError on an error event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    event = msgspec.json.decode(line.removeprefix("data: "))
    if "error" in event:
        raise ServerError(str(event["error"].get("message", event["error"])))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def error_message(body: bytes) -> str:
    """Returns the message of an OpenAI error body, or the first line of any other body."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").split("\n")[0][:200]


def converse(client: ChatClient, console: Console) -> None:
    """Reads lines and prints answers until end of input."""
    while True:
        try:
            text = console.input("[bold]you>[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            continue
        try:
            for piece in client.ask(text):
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            client.messages.pop()  # closing the stream has cancelled the answer
        except ServerError as error:
            client.messages.pop()
            console.print(f"[red]{error}[/red]")
        console.print()
