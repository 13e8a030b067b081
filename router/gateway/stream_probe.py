"""Probes a version with one streamed and one whole answer, like a client but without a socket.

`router.probes` sends requests to a version's router. This probe also covers the parts before and
after the router: chat template, tokenizer, detokenizer, server-sent events. Both answers must be
complete and have the same text.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Message

from router.access.guard import with_tenant
from router.access.limits import KeyLimits, Tenant
from router.gateway.answering import GatewayParts
from router.gateway.answers.writing import CHAT, COMPLETION
from router.gateway.endpoint import CallEndpoint, HttpAnswers
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.versions import VERSION_HEADER, ServedVersion
from router.probes import ANSWER_LEN, SHORT_TEXT, TENANT, WITHIN_S

MANY = 10**6  # limits of the probe's key, too high to refuse a probe
PROBER = Tenant(TENANT, TENANT, KeyLimits(MANY, 1000 * MANY, MANY), may_debug=False)
LEAST_LEN = 512  # tokens of context that a short chat with its template needs
DONE = "[DONE]"
_TEXTS = ("content", "reasoning_content", "text")


class _BadAnswer(Exception):
    """An answer to a probe is wrong. The text of the exception describes the fault."""


class StreamProbe:
    """Sends calls to the endpoints of a gateway for a version that no client uses yet."""

    def __init__(self, parts: GatewayParts) -> None:
        self._versions = parts.versions
        self._chat = CallEndpoint(parts, HttpAnswers(parts, CHAT, ChatBody).serve)
        self._text = CallEndpoint(parts, HttpAnswers(parts, COMPLETION, CompletionBody).serve)

    async def fault_of(self, version: str) -> str:
        """Returns the fault in the answers of a version; empty if there is none."""
        served = next((each for each in self._versions.table if each.name == version), None)
        if served is None or served.text.embedding is not None or served.max_len < LEAST_LEN:
            return ""
        try:
            async with asyncio.timeout(WITHIN_S):
                whole = _text_of(_only_choice(await self._ask(served, stream=False)), "message")
                streamed = _streamed_text(await self._ask(served, stream=True))
        except TimeoutError:
            return f"a streamed answer was not complete in {WITHIN_S:g} s"
        except _BadAnswer as fault:
            return str(fault)
        if streamed != whole:
            return f"an answer was {whole!r}, and streamed {streamed!r}"
        return ""

    async def _ask(self, served: ServedVersion, *, stream: bool) -> bytes:
        """Sends a short request. Returns the body of its answer. Raises _BadAnswer."""
        has_template = served.text.has_template
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": SHORT_TEXT}]}
            if has_template
            else {"prompt": SHORT_TEXT}
        )
        body = {
            **asked,
            "model": served.model_names[0],
            "max_tokens": ANSWER_LEN,
            "temperature": 0,
            "stream": stream,
        }
        call = _Call(served.name, msgspec.json.encode(body))
        await (self._chat if has_template else self._text)(call.scope, call.receive, call.send)
        if call.status != 200:
            said = call.body[:200].decode(errors="replace")
            raise _BadAnswer(f"a request over HTTP was answered by {call.status}: {said}")
        return bytes(call.body)


class _Call:
    """One request to an ASGI application, from a client that never leaves."""

    def __init__(self, version: str, content: bytes) -> None:
        self.scope = with_tenant(
            {
                "type": "http",
                "method": "POST",
                "path": "/",
                "query_string": b"",
                "headers": [
                    (b"content-type", b"application/json"),
                    (VERSION_HEADER.encode(), version.encode()),
                ],
            },
            PROBER,
        )
        self.status = 0
        self.body = bytearray()
        self._content: bytes | None = content
        self._never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive(self) -> Message:
        """Returns the body of the request.

        Later calls wait forever, because the client never leaves.
        """
        content, self._content = self._content, None
        if content is None:
            return await self._never
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        """Receives the head or a piece of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


def _streamed_text(body: bytes) -> str:
    """Joins the text of all events. Raises _BadAnswer if the stream is not complete."""
    *events, last = _events(body) or [""]
    if last != DONE:
        raise _BadAnswer(f"a stream ended without {DONE}")
    choices = [_only_choice(event.encode()) for event in events]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(reasons) != 1:
        raise _BadAnswer(f"a stream has {len(reasons)} finish reasons")
    return "".join(_text_of(choice, "delta") for choice in choices)


def _events(body: bytes) -> list[str]:
    return list(_data(body.decode(errors="replace")))


def _data(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _only_choice(event: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(event)
        choice = found["choices"][0]
        assert isinstance(choice, dict)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError) as error:
        said = event[:200].decode(errors="replace")
        raise _BadAnswer(f"a part of an answer has no choice: {said}") from error
    return choice


def _text_of(choice: dict[str, Any], part: str) -> str:
    """Returns the text of a choice. In chats, the text is in the choice's field `part`."""
    holder = choice.get(part, choice)
    return "".join(holder.get(name) or "" for name in _TEXTS)
