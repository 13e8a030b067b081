"""What log lines of all floors have in common: the request worked for, and three loggers.

A task's context is inherited by the tasks and callbacks that it starts. So one assignment a request
is enough, and a line that is logged anywhere below has the request's id. Work that a request starts
for others too, such as a timer, gets a `Context()` of its own: its lines must not name the request.
"""

import logging
from contextvars import ContextVar

# The ids of the request: the server's own, and after a space the client's if it gave one.
REQUEST: ContextVar[str] = ContextVar("baton_request", default="")


def request_ids(own_id: str, client_id: str | None) -> str:
    """Returns the value of REQUEST for a request."""
    return f"{own_id} {client_id}" if client_id else own_id


ACCESS = logging.getLogger("baton.access")  # one line for each request to a gateway
NEWS = logging.getLogger("baton.news")  # what happens to the pools, as operators are told
AUDIT = logging.getLogger("baton.audit")  # one line for each order of an operator
CALLER_HEADER = "x-baton-caller"  # a gateway that passes an order on names its client here
