"""A hook of the process launcher: which network namespace each service runs in.

By default every service runs in the launcher's namespace. A `PlaceOf` returns another namespace for
a service, with the address at which the service is reached there. Chaos tests put each worker into
a namespace that can be cut off (`bench/chaos/placed.py`). `baton serve --launcher process --places
MODULE:FUNCTION` loads a hook: the function takes no argument and returns the `PlaceOf`.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, cast

from engine.errors import ConfigError


class ServicePlace(Protocol):
    """A network namespace for services. Hashable: the launcher keeps one nursery for each."""

    @property
    def address(self) -> str:
        """The IP address at which all other places reach this one."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Moves the calling thread, and processes that it starts, into the namespace."""
        ...


# Maps the kind ("worker" or "gateway") and the name of a service to its place. None: the launcher's
# namespace. A restarted worker keeps its name, and so its place.
PlaceOf = Callable[[str, str], ServicePlace | None]


def load_places(name: str) -> PlaceOf:
    """Imports MODULE:FUNCTION and calls it. Raises ConfigError if there is no such function."""
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--places {name}: {error}") from error
    return cast("PlaceOf", make())
