"""Logging that all packages share: the ids of the current request, and three loggers.

Tasks and callbacks inherit the context of the task that starts them. So one assignment per request
is enough: every line that is logged for the request contains its ids. A request may also start work
for other requests, such as a timer. Such work gets a `Context()` of its own, so that its lines do
not name the request.
"""

import logging
from contextvars import ContextVar

# The ids of the request: the server's id, then a space and the client's id if the client sent one.
REQUEST: ContextVar[str] = ContextVar("baton_request", default="")


def request_ids(own_id: str, client_id: str | None) -> str:
    """Returns the value that REQUEST has for a request with these ids."""
    return f"{own_id} {client_id}" if client_id else own_id


ACCESS = logging.getLogger("baton.access")  # one line for each request to a gateway
NEWS = logging.getLogger("baton.news")  # changes of the pools, for operators to read
AUDIT = logging.getLogger("baton.audit")  # one line for each order of an operator
CALLER_HEADER = "x-baton-caller"  # header that names the client of a forwarded order
