"""The interfaces of a request's trace in the gateway, and of the factory of traces.

A trace starts when the request arrives, and the spans are made when the request ends. If tracing is
off, requests have no traces.
"""

from collections.abc import Mapping
from typing import Protocol

from router.gateway.tracing.stages import Attributes
from router.machine.requests import Timeline

CONTEXT_HEADERS = ("traceparent", "tracestate")


class RequestTrace(Protocol):
    """The trace of one sampled request."""

    headers: Mapping[str, str]  # W3C trace context of the request's span, for the answer's head

    def add_choice(self, timeline: Timeline) -> None:
        """Records the timeline of a choice that has just ended."""
        ...

    def end(self, outcome: str, attributes: Attributes) -> None:
        """Ends the request's span, with the outcome and attributes."""
        ...


class Tracing(Protocol):
    """Starts traces."""

    def begin(
        self, name: str, request_id: str, received_s: float, headers: Mapping[str, str]
    ) -> RequestTrace | None:
        """Starts the trace of a request with these headers.

        Returns None if the trace is not sampled.
        """
        ...


def context_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the W3C trace context in headers; header names are in lower case."""
    return {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
