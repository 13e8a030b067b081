"""The trace of one request, as the gateway keeps it, and what begins one.

A trace is begun with the request and built at its end. Without tracing there is none, and nothing
is done.
"""

from collections.abc import Mapping
from typing import Protocol

from router.gateway.tracing.stages import Attributes
from router.machine.requests import Timeline

CONTEXT_HEADERS = ("traceparent", "tracestate")


class RequestTrace(Protocol):
    """The trace of one request that is sampled."""

    headers: Mapping[str, str]  # W3C trace context of its span, for the head of the answer

    def add_choice(self, timeline: Timeline) -> None:
        """Notes the timeline of a choice that has ended now."""
        ...

    def end(self, outcome: str, attributes: Attributes) -> None:
        """Ends the request. An `outcome` other than "finished" is told."""
        ...


class Tracing(Protocol):
    """Begins traces."""

    def begin(
        self, name: str, request_id: str, received_s: float, headers: Mapping[str, str]
    ) -> RequestTrace | None:
        """Returns the trace of a request that came with these headers; None: not sampled."""
        ...


def context_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the W3C trace context among headers, whose names are in lower case."""
    return {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
