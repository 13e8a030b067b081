"""What one API key may use, and what it has used: requests, tokens and open answers.

Pure: no clock, no HTTP; the gateway asks before it tokenises, and again when the prompt is known.
"""

import msgspec


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one key; None is no limit. Raises ValueError for one that is not positive."""

    requests_per_s: float | None = None
    tokens_per_min: int | None = None  # of prompts and answers
    max_streams: int | None = None  # requests in flight

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive")
