"""Values in the headers of a call. Pure."""

from collections.abc import Mapping, Sequence

from router.inbox.api_errors import invalid_value

MAX_SHOWN_LEN = 40  # characters of a client's text in an error


def headers_of(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of an ASGI scope, by name. Of several with one name, the first one.

    Starlette's own mapping searches all of them for each name.
    """
    named = reversed(headers)
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in named}


def seconds_in(
    headers: Mapping[str, str], name: str, least_s: float, most_s: float
) -> float | None:
    """Returns the seconds that a header names; None without this header. Raises ApiError."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least_s <= seconds <= most_s:
        message = (
            f"{name} is {text[:MAX_SHOWN_LEN]!r}; expected seconds from {least_s:g}, "
            f"at most {most_s:g}"
        )
        raise invalid_value(message, name)
    return seconds
