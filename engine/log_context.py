"""Logging that all packages share: the current request's ids, and three loggers.

Tasks and callbacks inherit the context of the task that starts them. So one assignment per request
is enough: every line that is logged on behalf of the request has its id. Work that a request starts
for others too, such as a timer, gets a `Context()` of its own. Its lines must not name the request.
"""

import logging
from contextvars import ContextVar

# The ids of the request: the server's id, then a space and the client's id if it sent one.
REQUEST: ContextVar[str] = ContextVar("baton_request", default="")


def request_ids(own_id: str, client_id: str | None) -> str:
    """Returns the value of REQUEST for a request."""
    return f"{own_id} {client_id}" if client_id else own_id


ACCESS = logging.getLogger("baton.access")  # one line for each request to a gateway
NEWS = logging.getLogger("baton.news")  # changes of the pools, for operators
AUDIT = logging.getLogger("baton.audit")  # one line for each order of an operator
CALLER_HEADER = "x-baton-caller"  # the client of an order that a gateway forwards
