"""`baton chat`: a streaming terminal client of any OpenAI-compatible server.

A line that begins with a slash is a command: `/help` lists them. A line that begins with `//` is
sent with one slash. On a terminal, arrow keys edit the line and recall earlier lines, which are
kept in a file.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from engine.errors import BatonError

MAX_HISTORY = 1000  # maximum number of lines in the history file
COMMANDS = {
    "/help": "shows this list",
    "/system [TEXT]": "sets the system message, or removes it",
    "/set [NAME=VALUE ...]": "sets parameters of requests, as temperature=0; alone, shows them",
    "/unset NAME ...": "leaves parameters to the server",
    "/reset": "forgets the conversation, but not the system message",
    "/retry": "asks for the last answer again",
    "/save FILE": "writes the conversation as JSON, as a request has it",
    "/exit": "ends, as Ctrl-D does",
}


class ServerError(BatonError):
    """The server refused a request, or the connection to the server broke."""


class ChatClient:
    """Keeps the messages of a conversation, and sends them with each request."""

    def __init__(self, client: httpx.Client, model: str, options: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self.options = options
        self.system = ""
        self.messages: list[dict[str, str]] = []

    @property
    def request(self) -> dict[str, Any]:
        """Returns the body of a request for the next answer, without `stream`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self._model, "messages": [*system, *self.messages], **self.options}

    def ask(self, text: str) -> Iterator[str]:
        """Sends a user message and yields the answer in pieces. Raises ServerError."""
        self.messages.append({"role": "user", "content": text})
        body = {**self.request, "stream": True}
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
    """Returns the name of the first model in the server's list. Raises ServerError."""
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
    """Returns the message in an OpenAI error body. Returns the first line of any other body."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").split("\n")[0][:200]


class ChatRefused(BatonError):
    """A slash command of `baton chat` cannot be carried out."""


class ChatCommands:
    """Carries out the slash commands of a conversation."""

    def __init__(self, client: ChatClient) -> None:
        self.client = client
        self.has_ended = False

    def carried_out(self, line: str) -> str:
        """Carries out a command. Returns the text to print. Raises ChatRefused."""
        name, _, rest = line.partition(" ")
        words = rest.split()
        client = self.client
        match name:
            case "/help":
                return "\n".join(f"{usage:24}{what}" for usage, what in COMMANDS.items())
            case "/system":
                client.system = rest.strip()
                return "the system message is " + ("set" if client.system else "removed")
            case "/set":
                client.options |= _assigned(words)
                return _shown(client.options)
            case "/unset":
                for word in words:
                    client.options.pop(word, None)
                return _shown(client.options)
            case "/reset":
                client.messages.clear()
                return "the conversation is forgotten"
            case "/save":
                return _save(client.request, rest.strip())
            case "/exit" | "/quit":
                self.has_ended = True
                return ""
        raise ChatRefused(f"{name} is no command; /help lists them")

    def last_question(self) -> str:
        """Removes the last question and its answer from the conversation; returns the question.

        Raises ChatRefused.
        """
        while self.client.messages:
            last = self.client.messages.pop()
            if last["role"] == "user":
                return last["content"]
        raise ChatRefused("nothing was asked yet")


def _assigned(words: list[str]) -> dict[str, Any]:
    """Parses NAME=VALUE. A value that is not valid JSON is used as a string. Raises ChatRefused."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ChatRefused(f"write NAME=VALUE, not {word!r}")
        if name in ("messages", "model", "stream"):
            raise ChatRefused(f"{name} cannot be set here")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def _shown(options: Mapping[str, Any]) -> str:
    shown = (f"{name}={msgspec.json.encode(value).decode()}" for name, value in options.items())
    return " ".join(shown) or "no parameter is set"


def _save(request: Mapping[str, Any], name: str) -> str:
    """Writes the conversation to a new file that only this user can read. Raises ChatRefused."""
    if not name:
        raise ChatRefused("write /save FILE")
    path = Path(name).expanduser()
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(request)) + b"\n")
    except OSError as error:
        raise ChatRefused(f"{path}: {error.strerror}") from error
    return f"saved in {path}"


def history_file(environment: Mapping[str, str]) -> Path:
    """Returns the path of the file that keeps earlier input lines."""
    state = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "baton" / "chat_history"


@contextlib.contextmanager
def line_editing(path: Path) -> Iterator[None]:
    """Enables line editing, with a history file that only this user can read.

    Does nothing in a pipe.
    """
    if not sys.stdin.isatty():
        yield
        return
    import readline  # imported here, because the import changes how the terminal behaves

    readline.set_history_length(MAX_HISTORY)
    with contextlib.suppress(OSError):  # the history file does not exist yet, or cannot be read
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # if the write fails, only the history is lost
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(path)


def converse(client: ChatClient, console: Console) -> None:
    """Reads lines, carries out commands, and prints answers until the end of input."""
    chat = ChatCommands(client)
    with line_editing(history_file(os.environ)):
        while not chat.has_ended:
            try:
                line = console.input("[bold]you>[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            try:
                if line == "/retry":
                    _answer(client, chat.last_question(), console)
                elif line.startswith("/") and not line.startswith("//"):
                    if said := chat.carried_out(line):
                        console.print(said, markup=False, highlight=False, soft_wrap=True)
                elif line:
                    _answer(client, line.removeprefix("/"), console)
            except ChatRefused as error:
                console.print(str(error), style="red", markup=False, highlight=False)


def _answer(client: ChatClient, text: str, console: Console) -> None:
    """Prints the pieces of an answer as they arrive.

    Ctrl-C cancels the answer and removes the question.
    """
    try:
        for piece in client.ask(text):
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        client.messages.pop()  # closing the stream has cancelled the answer
    except ServerError as error:
        client.messages.pop()
        console.print(str(error), style="red", markup=False, highlight=False)
    console.print()
