"""The audit log: one line for each order that came with the admin key, carried out or refused.

A line has the time, the client's address, the order and its result. Previews change nothing, and
are left out. Orders with a wrong key are warnings of the ordinary log, which is bounded: a client
without the key cannot fill a file.
"""

from starlette.requests import Request

from engine.log_context import AUDIT, CALLER_HEADER

MAX_CALLER_CHARS = 200


def record_order(request: Request, order: object | None, status: int, refusal: str = "") -> None:
    """Writes the audit line of a call. `order` is None if the body could not be decoded."""
    caller = request.headers.get(CALLER_HEADER, "")[:MAX_CALLER_CHARS]
    fields = {
        "who": "admin",
        "from": address_of(request),
        "caller": caller,
        "what": str(order) if order is not None else f"{request.method} {request.url.path}",
        "status": status,
        "refusal": refusal,
    }
    told = {name: value for name, value in fields.items() if value != ""}
    text = " ".join(f"{name}={value}" for name, value in told.items())
    AUDIT.info("order: %s", text, extra={"fields": told})


def address_of(request: Request) -> str:
    """Returns the address of the client, or of the gateway that forwards the client's order."""
    return request.client.host if request.client is not None else ""
