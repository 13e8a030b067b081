"""The specs that start workers, gateways and stores, and their answers once they listen.

A spec and its answer have the same `kind`, which names the service in commands and processes.
"""

from typing import ClassVar

import msgspec

from engine.config import (
    GatewayConfig,
    LogsConfig,
    RouterConfig,
    StoreConfig,
    Transport,
)
from engine.control import FIRST_VERSION, Members
from engine.devices.settings import WorkerSettings
from engine.messages import EventsAddress, Role, WorkerId

READY_TIMEOUT_S = 300.0  # longest time from spec to answer, without the fetch of the model
SLOWEST_BYTES_PER_S = 100e6  # assumed read speed: the start of a large model may take longer


class WorkerSpec(msgspec.Struct, frozen=True):
    """The parameters of a worker's start."""

    kind: ClassVar[str] = "worker"
    worker_id: WorkerId
    role: Role
    model: str  # in a form that `model_source` reads
    config: WorkerSettings
    token: str
    threads: int
    # Memory of all workers of the machine; None: all available memory.
    memory_bytes: int | None = None
    num_workers: int = 1  # workers that share this memory
    kept_bytes: int = 0  # part of `memory_bytes` that a store will take
    host: str = "127.0.0.1"
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # argument of `run_dir.log_folder`; None: no log lines are kept
    version: str = FIRST_VERSION
    num_gpus: float = 0.0  # whole GPUs, or a part of one GPU
    # Names in CUDA_VISIBLE_DEVICES of the GPUs that the worker sees. None: Ray has already set that
    # variable in the worker's environment.
    gpus: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The name of the service."""
        return self.worker_id


class WorkerFacts(msgspec.Struct, frozen=True):
    """The device, kernels and transports of a worker, as chosen at its start."""

    device: str  # cpu or cuda
    kernels: str  # kind of processor or GPU, and the way in which steps are run
    weights: str
    kv_format: str
    kv_bytes: int
    attention: str
    captured_steps: int
    transports: tuple[str, ...]  # transports by which other workers can read this worker's KV
    fallbacks: dict[str, int] = {}  # optional parts that this machine lacks, with their number

    def __str__(self) -> str:
        """Returns all facts in one line."""
        steps = f", {self.captured_steps} captured steps" if self.captured_steps else ""
        without = f"; without {', '.join(sorted(self.fallbacks))}" if self.fallbacks else ""
        return (
            f"{self.device} ({self.kernels}): weights {self.weights}, KV {self.kv_format} of"
            f" {self.kv_bytes / 2**30:.1f} GiB, attention {self.attention}{steps}, KV by"
            f" {', '.join(self.transports)}{without}"
        )


class WorkerReady(msgspec.Struct, frozen=True):
    """A worker's answer to its spec, sent once the worker listens."""

    kind: ClassVar[str] = "worker"
    address: str
    pid: int
    context_len: int
    num_blocks: int
    block_bytes: int
    start_s: float  # time from the worker's spec until the worker listened
    version: str = FIRST_VERSION
    max_len: int = 0  # tokens of one request: the context, or less if KV memory is smaller
    # True if a sequence's logits do not depend on the batch. Measured for this model and format.
    is_batch_invariant: bool = True
    facts: WorkerFacts | None = None  # None for a worker without a runner


class GatewaySpec(msgspec.Struct, frozen=True):
    """The parameters of a gateway's start."""

    kind: ClassVar[str] = "gateway"
    members: Members  # the members at the time of the start
    gateway: GatewayConfig
    router: RouterConfig
    token: str
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # as in `WorkerSpec`
    name: str = "gateway"
    process: int = 0  # number of this gateway among the processes that share the port
    siblings: str | None = None  # a directory, if several processes share the port
    ports: str | None = None  # a directory for passing listening sockets; None: it makes its own
    host: str = "127.0.0.1"  # host at which the controller reaches the gateway
    salts: str | None = None  # the secret of tenants' salts; None: the token is used


class GatewayReady(msgspec.Struct, frozen=True):
    """A gateway's answer to its spec, sent once the gateway listens."""

    kind: ClassVar[str] = "gateway"
    url: str
    model_name: str
    pid: int
    control: str = ""  # address at which the gateway listens for the controller
    drain_timeout_s: float = 0.0  # longest time for which a stop waits for answers
    grpc_port: int | None = None  # None: the gateway does not serve gRPC


class StoreSpec(msgspec.Struct, frozen=True):
    """The parameters of a store's start."""

    kind: ClassVar[str] = "store"
    name: str
    members: Members  # the members at the time of the start
    config: StoreConfig
    token: str
    version: str = FIRST_VERSION  # version of the model whose blocks the store keeps
    transport: Transport = Transport.AUTO
    host: str = "127.0.0.1"
    node: str = ""  # cluster node on which the store runs
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # as in `WorkerSpec`


class StoreReady(msgspec.Struct, frozen=True):
    """A store's answer to its spec, sent once the store listens.

    Its addresses survive restarts of its process.
    """

    kind: ClassVar[str] = "store"
    address: str  # address for gateways
    control: str  # address for the controller
    pid: int
    version: str = FIRST_VERSION
    node: str = ""


ServiceSpec = WorkerSpec | GatewaySpec | StoreSpec
ServiceReady = WorkerReady | GatewayReady | StoreReady
_SPECS: dict[str, type[ServiceSpec]] = {
    each.kind: each for each in (WorkerSpec, GatewaySpec, StoreSpec)
}
READY_TYPES: dict[str, type[ServiceReady]] = {
    each.kind: each for each in (WorkerReady, GatewayReady, StoreReady)
}


def decode_spec(kind: str, spec: bytes) -> ServiceSpec:
    """Decodes the spec of a kind of service."""
    return msgspec.json.decode(spec, type=_SPECS[kind])


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """Reports that the service fetches its model now. Sent only if the model must be fetched."""


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """Reports that the model has been fetched to this machine, and that the service starts."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Reports that the start may take this many seconds.

    Sent only if that exceeds READY_TIMEOUT_S.
    """

    limit_s: float


StartReport = Fetching | Fetched | Starting  # messages that are sent before the answer


class BlockEventsAnswer(msgspec.Struct, frozen=True):
    """CURVE keys in Z85 and addresses for a subscriber to block events.

    Each worker has one address at which it publishes events and one at which it answers queries
    (`engine.worker.block_events`). The keys give access to block events only. Each start of the
    deployment makes new keys.
    """

    curve_serverkey: str
    curve_publickey: str
    curve_secretkey: str
    workers: dict[WorkerId, EventsAddress]
