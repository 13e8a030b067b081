"""The trace of one request in the gateway, and the factory of traces.

A trace starts with the request, and its spans are made at its end. Without tracing there is no
trace, and nothing is done.
"""

from collections.abc import Mapping
from typing import Protocol

from router.gateway.tracing.stages import Attributes
from router.machine.requests import Timeline

CONTEXT_HEADERS = ("traceparent", "tracestate")


class RequestTrace(Protocol):
    """The trace of one sampled request."""

    headers: Mapping[str, str]  # W3C trace context of its span, for the head of the answer

    def add_choice(self, timeline: Timeline) -> None:
        """Records the timeline of a choice that has just ended."""
        ...

    def end(self, outcome: str, attributes: Attributes) -> None:
        """Ends the request. An `outcome` other than "finished" is recorded."""
        ...


class Tracing(Protocol):
    """Starts traces."""

    def begin(
        self, name: str, request_id: str, received_s: float, headers: Mapping[str, str]
    ) -> RequestTrace | None:
        """Returns the trace of a request with these headers; None if it is not sampled."""
        ...


def context_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the W3C trace context in headers; header names are in lower case."""
    return {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
