"""Specs with which workers and gateways start, and their answers once they listen."""

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

READY_TIMEOUT_S = 300.0  # from spec to ready; a fetch of the model comes on top
SLOWEST_BYTES_PER_S = 100e6  # at which a model may be read; a large one has a longer start


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything that a worker is started with."""

    worker_id: WorkerId
    role: Role
    model: str  # as `model_source` reads it
    config: WorkerSettings
    token: str
    threads: int
    memory_bytes: int | None = None  # for all workers of the machine; None: all that is available
    num_workers: int = 1  # workers that share this memory
    kept_bytes: int = 0  # the part of this memory that a store will take
    host: str = "127.0.0.1"
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # as `run_dir.log_folder` takes it; None: no lines are kept
    version: str = FIRST_VERSION
    num_gpus: float = 0.0  # whole ones, or a part of one
    # What it sees of its machine's GPUs, as CUDA_VISIBLE_DEVICES names them. None: its environment
    # says so, which Ray has set.
    gpus: tuple[str, ...] | None = None


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker computes with and how its KV moves, as chosen at its start."""

    device: str  # cpu or cuda
    kernels: str  # kind of processor or GPU, and how steps run
    weights: str
    kv_format: str
    kv_bytes: int
    attention: str
    captured_steps: int
    transports: tuple[str, ...]  # by which others can read its KV
    fallbacks: dict[str, int] = {}  # parts that it does without

    def __str__(self) -> str:
        """All of it in one line."""
        steps = f", {self.captured_steps} captured steps" if self.captured_steps else ""
        without = f"; without {', '.join(sorted(self.fallbacks))}" if self.fallbacks else ""
        return (
            f"{self.device} ({self.kernels}): weights {self.weights}, KV {self.kv_format} of"
            f" {self.kv_bytes / 2**30:.1f} GiB, attention {self.attention}{steps}, KV by"
            f" {', '.join(self.transports)}{without}"
        )


class WorkerReady(msgspec.Struct, frozen=True):
    """A worker's answer once it listens."""

    address: str
    pid: int
    context_len: int
    num_blocks: int
    block_bytes: int
    start_s: float  # from its spec until it listened
    version: str = FIRST_VERSION
    max_len: int = 0  # tokens of one request: the context, or less if KV memory is smaller
    # Whether logits of a sequence do not depend on the batch; measured for this model and format.
    is_batch_invariant: bool = True
    facts: WorkerFacts | None = None  # None for a worker without a runner


class GatewaySpec(msgspec.Struct, frozen=True):
    """Everything that a gateway is started with."""

    members: Members  # at the time of the start
    gateway: GatewayConfig
    router: RouterConfig
    token: str
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # as of a worker
    name: str = "gateway"
    process: int = 0  # its number among the processes that share the port
    siblings: str | None = None  # a directory, if several processes share the port
    ports: str | None = None  # a directory where listening sockets are handed on; None: it listens
    control_host: str = "127.0.0.1"  # where the controller reaches it
    salts: str | None = None  # the secret of tenants' salts; None: the token


class GatewayReady(msgspec.Struct, frozen=True):
    """A gateway's answer once it listens."""

    url: str
    model_name: str
    pid: int
    control: str = ""  # address for the controller
    drain_timeout_s: float = 0.0  # its stop may take this long
    grpc_port: int | None = None  # None: it does not serve gRPC


class StoreSpec(msgspec.Struct, frozen=True):
    """Everything that a store is started with."""

    name: str
    members: Members  # at the time of the start
    config: StoreConfig
    token: str
    version: str = FIRST_VERSION  # the model whose blocks it keeps
    transport: Transport = Transport.AUTO
    host: str = "127.0.0.1"
    node: str = ""  # the cluster's node that it runs on
    logs: LogsConfig = LogsConfig()
    log_folder: str | None = None  # as of a worker


class StoreReady(msgspec.Struct, frozen=True):
    """A store's answer once it listens. Its addresses stay if its process is started again."""

    address: str  # for gateways
    control: str  # for the controller
    pid: int
    version: str = FIRST_VERSION
    node: str = ""


class Fetching(msgspec.Struct, frozen=True, tag=True):
    """Says that the service fetches its model now. Sent only if there is something to fetch."""


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """Says that the model is on this machine, and the service starts now."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Says that the start may take so long. Sent only if that is more than READY_TIMEOUT_S."""

    limit_s: float


class BlockEventsAnswer(msgspec.Struct, frozen=True):
    """CURVE keys in Z85 and addresses for a subscriber to block events.

    Each worker has an address where it publishes and one where it answers
    (`engine.worker.block_events`). The keys open block events only. Each start of the deployment
    makes new keys.
    """

    curve_serverkey: str
    curve_publickey: str
    curve_secretkey: str
    workers: dict[WorkerId, EventsAddress]
