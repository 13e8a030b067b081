"""Values in the headers of a call. Pure."""

from collections.abc import Mapping

from router.inbox.api_errors import invalid_value

MAX_SHOWN_LEN = 40  # characters of a client's text in an error


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
