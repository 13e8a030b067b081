"""Takes the answer to one request of a batch, as an HTTP client would get it."""

from starlette.types import Message

from engine.errors import InvalidRequest
from router.edge.responses import send_invalid
from router.gateway.answers.whole import whole_answer
from router.gateway.answers.writing import AnswerWriter, Heading


class CapturedAnswer:
    """Keeps the response to one call."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body = bytearray()

    @property
    def body(self) -> bytes:
        """The response's body, JSON."""
        return bytes(self._body)

    async def refuse(self, error: InvalidRequest) -> None:
        """Keeps an error."""
        await send_invalid(self.send, error)

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns the writer of the whole answer."""
        return whole_answer(heading, self.send)

    async def send(self, message: Message) -> None:
        """Takes a part of the response, as ASGI sends it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")
