"""The access log: one line for each request over HTTP or gRPC, written when its answer has ended.

For each request, the log wraps the head of the response and writes one line. Tokens cost nothing.
The query of a URL is left out, since clients put secrets there. Requests that the listener refuses
are not logged.
"""

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.clock import Clock
from engine.log_context import ACCESS
from router.access.guard import tenant_of
from router.gateway.metrics.meters import RequestMeter

METER = "baton.meter"  # key in an ASGI scope: the request's meter, from which the log line is made
_ID = b"x-request-id"


class AccessLog:
    """An ASGI application that wraps another application and logs each request to it."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, and writes the request's log line even if the application raises an
        error.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s = self._clock.now_s()
        head: Message = {}

        async def recorded(message: Message) -> None:
            nonlocal head
            head = head or message
            await send(message)

        try:
            await self._app(scope, receive, recorded)
        finally:
            _log(scope, head, self._clock.now_s() - start_s)


@dataclass(frozen=True, slots=True)
class AccessLine:
    """One answered request. A field that does not apply to the request is empty."""

    client: str  # the client's address
    method: str
    path: str
    status: int  # HTTP status; 0: the client left before a status was sent
    seconds: float
    key: str = ""  # the name of the API key
    request_id: str = ""  # the id that the client received

    def write(self, meter: RequestMeter | None = None) -> None:
        """Writes the log line, without its empty fields."""
        fields: dict[str, object] = {
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "key": self.key,
        }
        if meter is not None:
            fields |= {
                "prompt_tokens": meter.prompt_tokens,
                "completion_tokens": meter.num_sent_tokens,
                "outcome": meter.outcome,
                "request": meter.request_id,
            }
        fields["request_id"] = self.request_id
        shown = {name: value for name, value in fields.items() if value != ""}
        text = " ".join(f"{name}={value}" for name, value in shown.items())
        ACCESS.info("%s", text, extra={"fields": shown})


def _log(scope: Scope, head: Message, seconds: float) -> None:
    shown_id = next((value for name, value in head.get("headers", ()) if name == _ID), b"")
    client = scope.get("client")
    line = AccessLine(
        client=client[0] if client else "",
        method=scope["method"],
        path=scope["path"],
        status=head.get("status", 0),
        seconds=seconds,
        key=tenant_of(scope).name,
        request_id=shown_id.decode("latin-1"),
    )
    line.write(scope.get(METER))
