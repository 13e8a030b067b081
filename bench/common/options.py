"""Options that several benchmarks share: peers, and choices from a list. Pure."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """The name of a peer, and the path of the Python that runs the peer."""

    name: str
    python: Path


def peers_named(options: Sequence[str], known: Collection[str]) -> tuple[PeerProgram, ...]:
    """Parses the options `--peer NAME=PYTHON`. Raises ConfigError with the reason."""
    found: dict[str, PeerProgram] = {}
    for option in options:
        name, separator, python = option.partition("=")
        if not separator or name not in known:
            raise ConfigError(f"--peer {option!r} is not NAME=PYTHON with a NAME of {_list(known)}")
        if name in found:
            raise ConfigError(f"--peer names {name} twice")
        if not Path(python).is_file():
            raise ConfigError(f"--peer {name}: there is no {python}")
        found[name] = PeerProgram(name, Path(python))
    return tuple(found.values())


def environment_of_peers() -> dict[str, str]:
    """Returns the environment variables for peers: ours without those for our own Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def check_choices(option: str, chosen: Sequence[str], known: Collection[str]) -> None:
    """Raises ConfigError if nothing is chosen, or if a choice is not in `known`."""
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        told = _list(unknown) or "none given"
        raise ConfigError(f"{option} must be out of {_list(known)}: {told}")


def _list(names: Collection[str]) -> str:
    return ", ".join(names)
