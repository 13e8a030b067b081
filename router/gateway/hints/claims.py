"""Clients' claims about sessions: converts names of keys and sessions to ids for stores. Pure.

A store receives two ids, one for the API key and one for the session. Both ids are keyed digests.
So no client can name a session of another key, and somebody who reads messages to stores learns
neither names nor keys.

    id = blake2b(owner, session; key = deployment's secret, for this purpose)

Sources: RFC 7693, keyed BLAKE2 as a pseudo-random function.
"""

import re
from collections.abc import Mapping

import msgspec

from engine.messages import MAX_KEEP_S
from engine.net.trust import Secret
from router.access.limits import Tenant
from router.inbox.api_errors import invalid_value
from router.inbox.json_values import seconds_in

SESSION_HEADER = "x-baton-session"
KEEP_HEADER = "x-baton-keep-s"
MAX_SESSION_LEN = 128  # maximum characters of a session's name
MIN_KEEP_S = 0.001
SESSION_PATTERN = f"^[!-~]{{1,{MAX_SESSION_LEN}}}$"  # the name of a session: visible ASCII
ID_BYTES = 16  # bytes of a digest; an id is the digest in hexadecimal

_SESSION = re.compile(SESSION_PATTERN.removesuffix("$") + r"\Z")


class SessionClaim(msgspec.Struct, frozen=True):
    """A call's claim to belong to a session, with the ids that stores receive."""

    key: str
    session: str
    keep_s: float | None = None  # seconds until the session's next request, as the client expects


def claim_of(headers: Mapping[str, str], tenant: Tenant, secret: Secret) -> SessionClaim | None:
    """Returns the session claim in the headers of a call; None without a claim. Raises ApiError."""
    text, keep = headers.get(SESSION_HEADER), headers.get(KEEP_HEADER)
    if text is None:
        if keep is not None:
            raise invalid_value(f"{KEEP_HEADER} needs {SESSION_HEADER}", KEEP_HEADER)
        return None
    check_session(text, SESSION_HEADER)
    keep_s = seconds_in(headers, KEEP_HEADER, MIN_KEEP_S, MAX_KEEP_S)
    return SessionClaim(key_id(tenant, secret), session_id(text, tenant, secret), keep_s)


def check_session(text: str, param: str) -> None:
    """Raises ApiError if a client's text is not a valid session name."""
    if _SESSION.match(text) is None:
        message = f"{param} must be 1 to {MAX_SESSION_LEN} visible ASCII characters"
        raise invalid_value(message, param)


def key_id(tenant: Tenant, secret: Secret) -> str:
    """Returns the id of an API key. If the gateway has no keys, all clients share one id."""
    return secret.digest("keys in hints", tenant.owner, size=ID_BYTES).hex()


def session_id(text: str, tenant: Tenant, secret: Secret) -> str:
    """Returns the id of a session of this tenant. `text` is the client's name of the session."""
    return secret.digest("sessions in hints", tenant.owner, text, size=ID_BYTES).hex()
