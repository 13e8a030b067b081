"""The tree of Baton's errors. The type says which fault it is, the fields give the facts.

An error that crosses a module's border, or reaches a user, is in this tree. Errors of more than one
room are defined here, the others where they are raised. A test compares the tree with the source.

BatonError
├── InvalidRequest            a request that cannot be served as it is: the client's fault
│   └── ApiError              the same, with OpenAI's machine-readable code
│       ├── LimitExceeded     an API key has used up its limit
│       └── NotReady          no version of a model can answer yet
├── GrammarError              a grammar, schema or expression that cannot be followed
├── GrammarBusy               there is no time to check a grammar now
├── OrderRefused              an administrator's order that cannot be carried out
├── ConfigError               a setting or a file that cannot be used: the operator's fault
│   ├── CheckpointError       a model directory that cannot be served
│   ├── UntrustedFile         a cached file that another user can have written
│   ├── KeysError             a file of API keys that cannot be read or changed
│   ├── TlsError              certificate files that cannot be used
│   ├── NoRoom               no node has room for a worker
│   ├── LateStart             a service takes too long to open
│   ├── OtherVersion          a running cluster whose version does not match
│   ├── CannotPlan            a load and bounds that no plan meets
│   ├── TraceError            a trace that cannot be read
│   └── TooFewSamples         a recording too short to fit costs to
├── ProtocolError             a frame that the protocol does not allow: the peer's fault
│   └── Untrusted             a peer that does not prove that it holds the deployment's secret
├── ObjectStoreFailed         the object store, or its library, failed
├── DirectoryInUse            a directory of blocks that another process uses
├── DiskUnusable              a directory that cannot hold blocks
├── UringUnavailable          io_uring cannot be used here
├── PeerSilent                no frame has come from a peer for too long
├── LayoutMismatch            two workers whose configuration forbids to exchange KV
├── Disagreement              two workers whose blocks cannot be converted into each other
├── TransportUnavailable      a transport of KV cannot be used here, or not with this source
├── DriverError               a GPU refuses an operation of a transfer
├── ShmUnavailable            another worker's memory cannot be mapped
├── NoWords                   words of leases cannot be used between two workers
├── CannotSeal                blocks cannot be sealed here, so CURVE carries them
├── OutOfBlocks               the KV pool is full; a scheduler always catches it
├── StepStuck                 a worker's step lasts longer than any should
├── RankDied                  a rank of a worker has ended, and the worker with it
├── BuildError                a C++ library cannot be built here
├── NotFused                  a model whose shape the C++ decoder does not compute
├── TooManyWorkers            more workers than the prefix index can tell apart
├── NoChild                   the nursery has not started a process
├── UnsafeFork                a fork that would copy threads or a CUDA context
├── AdminError                the controller cannot be asked, or refuses
├── BadIntents                a store of orders that cannot be read
├── ChatRefused               a command of `baton chat` that cannot be carried out
├── ServerError               the server that `baton chat` talks to refuses or breaks off
├── ServerFailed              a benchmark: `baton serve` did not start
├── ServerUnreachable         a benchmark: no OpenAI-compatible server answers
├── RequestsFailed            a benchmark: too many requests failed for a result
├── DrivenFailed              a benchmark: a process that it drives failed
├── DeploymentFailed          a benchmark: workers did not join, or a request was not answered
├── OrderFailed               a benchmark: the controller did not take an order
├── BatchNotCompleted         a benchmark: a batch ended in another way, or not at all
├── PaceUnknown               a benchmark: the deployment's speed could not be measured
├── NotFlipped                a benchmark: a worker did not take its new role
├── NotMovable                a benchmark: this machine lacks a way to move KV
├── CeilingExceeded           a benchmark: a result above what the machine was measured to allow
├── WrongBytes                a benchmark: moved KV differs from its source
├── TransferError             a benchmark: a pull of KV failed
├── DiskNotMeasured           a benchmark: the disk could not be measured
├── PrefixElsewhere           a benchmark: a prefix did not come from where it should
├── StoreNotReady             a benchmark: a store did not take in what it should
├── StoreUnseen               a fault test: a store's state cannot be seen
├── StreamsApart              a benchmark: its streams never decoded all at once
├── NotUndisturbed            a fault test: its run without faults is not clean
├── FaultFailed               a fault test: a fault could not be injected or undone
├── Unavailable               a fault test: this machine or user cannot have such a network
└── CommandFailed             a fault test: a system command failed

A request that fails is an event, not an exception. A bug in Baton is an `assert`.
"""

from pathlib import Path


class BatonError(Exception):
    """The base class of all errors that Baton raises on purpose."""


class InvalidRequest(BatonError):
    """A request that cannot be served. `param` is the field's name, `status` the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class ConfigError(BatonError):
    """A setting that cannot be used. The message names the setting."""


class CheckpointError(ConfigError):
    """A model directory that cannot be served. The message names the file or the property."""


class UntrustedFile(ConfigError):
    """A cached file that another user may have written."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} is not to be trusted: {why}")
        self.path = path
        self.why = why


class LayoutMismatch(BatonError):
    """Two workers cannot exchange KV, because a field differs that must be equal."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} differs: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ProtocolError(BatonError):
    """A peer has sent something that the protocol does not allow."""


class Untrusted(ProtocolError):
    """A peer has not proved that it has the deployment's secret. The message says which proof
    failed.

    There are few messages and their texts are fixed, because each message is the name of a counter.
    """


class StepStuck(BatonError):
    """A step of a worker has lasted `seconds`, which is longer than any step should last."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a step has lasted {seconds:.1f} s")
        self.seconds = seconds


class GrammarError(BatonError):
    """A grammar, schema or expression that cannot be followed. The message says why."""


class OutOfBlocks(BatonError):
    """Fewer blocks are free than the caller has requested."""

    def __init__(self, wanted_blocks: int, free_blocks: int) -> None:
        super().__init__(f"wanted {wanted_blocks} blocks, {free_blocks} are free")
        self.wanted_blocks = wanted_blocks
        self.free_blocks = free_blocks


class BuildError(BatonError):
    """The C++ library cannot be built on this machine. The message says why, in one line."""
