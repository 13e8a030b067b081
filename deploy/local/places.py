"""A hook of the process launcher: which network namespace each service runs in.

By default every service runs where the launcher runs. A `PlaceOf` sends a service somewhere else
and tells the service the address it is reached at there. Chaos tests use it to put each worker into
a namespace that can be cut off (`bench/chaos/placed.py`). `baton serve --launcher process
--places MODULE:FUNCTION` loads it: the function takes no argument and returns the `PlaceOf`.
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
        """Moves the calling thread, and every process it starts, into the namespace meanwhile."""
        ...


# From the kind ("worker" or "gateway") and the name of a service to its place. None: the launcher's
# own. A worker that is started again has the name, and so the place, of the one before it.
PlaceOf = Callable[[str, str], ServicePlace | None]


def load_places(name: str) -> PlaceOf:
    """Imports MODULE:FUNCTION and calls it. Raises ConfigError if there is no such function."""
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--places {name}: {error}") from error
    return cast("PlaceOf", make())
