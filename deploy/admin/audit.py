"""The audit log: one line for each order that came with the admin key, carried out or refused.

It says who ordered what, from where, and with which result; the line's time is when. Previews
order nothing, and are left out. Orders with a wrong key are warnings of the ordinary log, which is
bounded: a client without the key cannot fill a file.
"""

from starlette.requests import Request

from engine.log_context import AUDIT, CALLER_HEADER

MAX_CALLER_CHARS = 200


def record_order(request: Request, order: object | None, status: int, refusal: str = "") -> None:
    """Writes the line of a call; without an `order` its body was not understood."""
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
    """The address of the client, or of the gateway that passes its order on."""
    return request.client.host if request.client is not None else ""
