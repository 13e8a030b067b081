"""Errors, with the fault in the type and the facts as fields.

BatonError
├── InvalidRequest     the client's fault: a request that cannot be served as it is
├── ConfigError        the operator's fault: a setting or a file
│   ├── CheckpointError    a model directory that cannot be served
│   └── UntrustedFile      a file of a cache that another user can have written
├── LayoutMismatch     two workers that must not exchange KV
├── ProtocolError      a peer's fault: a frame that cannot be believed
│   └── Untrusted          a peer that does not prove that it holds the deployment's secret
├── StepStuck          a worker that computes nothing any more, and yet answers
└── OutOfBlocks        the KV pool is full (always caught by a scheduler)

The failure of one request is an event, not an exception; a bug in Baton is an `assert`.
"""

from pathlib import Path


class BatonError(Exception):
    """Base of all errors that Baton raises on purpose."""


class InvalidRequest(BatonError):
    """A request that cannot be served; `param` names the field, `status` is the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class ConfigError(BatonError):
    """A setting that cannot be used; the message names it."""


class CheckpointError(ConfigError):
    """A model directory that cannot be served; the message names the file or the property."""


class UntrustedFile(ConfigError):
    """A file of a cache that another user can have written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is not to be trusted: {why}")
        self.path = path
        self.why = why


class LayoutMismatch(BatonError):
    """Two workers differ in a field that must agree before KV moves between them."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ProtocolError(BatonError):
    """A peer sent something that the protocol does not allow."""


class Untrusted(ProtocolError):
    """A peer does not prove that it holds the deployment's secret; the message says how it fails.

    The messages are few and fixed: they name counters.
    """


class StepStuck(BatonError):
    """A step of a worker has lasted so many seconds, longer than any should."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a step has lasted {seconds:.1f} s")
        self.seconds = seconds


class GrammarError(BatonError):
    """A grammar, schema or expression that cannot be followed; the message says why."""


class OutOfBlocks(BatonError):
    """Fewer blocks are free than were asked for."""

    def __init__(self, wanted_blocks: int, free_blocks: int) -> None:
        super().__init__(f"wanted {wanted_blocks} blocks, {free_blocks} are free")
        self.wanted_blocks = wanted_blocks
        self.free_blocks = free_blocks
