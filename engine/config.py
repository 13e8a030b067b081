"""Configuration: one frozen tree, read from a file, then the environment, then flags. Later sources
win.

Unknown keys and values of the wrong type are errors that name the key. An environment variable is
`BATON_` and the key's path in capitals, joined by two underscores: BATON_WORKER__KV_MIB=512. The
text "none" unsets a key whose type allows None, because TOML and variables have no null. Defaults
run on a laptop. Each part of a process gets only its part of the tree, and does not write to it.
docs/users/tuning.md explains settings that affect speed. The comment at each key is its meaning in
`baton config reference` and docs/users/configuration.md: see `engine.config_reference`.
"""

import ipaddress
import re
import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from enum import StrEnum
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from engine.config_hints import faults_of, hint_of
from engine.errors import ConfigError
from engine.layout import KVFormat

ENVIRONMENT_PREFIX = "BATON_"
UNSET = "none"  # the value that unsets a key
MAX_KEY_BYTES = 256  # in an API key
MAX_MODELS = 16  # beside the main one
MAX_PRIORITY = 1000  # a request's; the least is -MAX_PRIORITY
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_BYTES}}}")  # characters that a header may have
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:_\[\]-]+")  # as browsers write it

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]  # a time, a rate, a factor
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Port = Annotated[int, Meta(ge=0, lt=2**16)]
Text = Annotated[str, Meta(min_length=1)]


class WeightFormat(StrEnum):
    """The formats in which a worker holds the weights of linear layers."""

    AUTO = "auto"  # int8 on a CPU with the kernels, else fp32; bf16 on a GPU
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"


class DeviceKind(StrEnum):
    """The kinds of devices on which workers compute."""

    AUTO = "auto"  # cuda where workers get GPUs and torch can use them, else cpu
    CPU = "cpu"
    CUDA = "cuda"


class Transport(StrEnum):
    """The ways in which KV may move between workers; AUTO chooses for each pair of workers."""

    AUTO = "auto"
    SHM = "shm"  # memory that workers on CPUs of one host share
    IPC = "ipc"  # memory of GPUs of one host, by CUDA
    NIXL = "nixl"
    ZMQ = "zmq"


class Speculate(StrEnum):
    """The source of the tokens that the target verifies, several in a step."""

    OFF = "off"
    NGRAM = "ngram"  # the tokens that followed the same ones earlier, in prompt or answer
    DRAFT = "draft"  # a small model
    AUTO = "auto"  # n-grams if they match, else the draft model if there is one


WITH_DRAFT = (Speculate.DRAFT, Speculate.AUTO)


class GenerationDefaults(StrEnum):
    """The source of sampling parameters that a request does not have."""

    AUTO = "auto"  # the model's generation_config.json
    NONE = "none"  # the API's


class DashboardMode(StrEnum):
    """The pages for people that a gateway serves at `/`, `/dashboard` and `/play`."""

    ON = "on"  # orders need the admin key
    READ_ONLY = "read-only"  # without orders
    OFF = "off"


class RouterPolicy(StrEnum):
    """The policies by which the router chooses workers for a request."""

    SLO = "slo"  # least predicted time to first token, within the bound on the time per token
    PREFIX = "prefix"  # the worker with most of the prompt cached, against its backlog
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"  # the less loaded of two random workers
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class Spread(StrEnum):
    """The ways to spread workers over the nodes of a cluster."""

    PACK = "pack"  # over as few as possible: KV moves through shared memory
    SPREAD = "spread"  # each role over as many as possible: a dying node takes few workers along


class LogFormat(StrEnum):
    """How processes write their log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least level of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class StoreEviction(StrEnum):
    """The rule by which the store's tiers give up blocks. A block goes before those before it."""

    LRU = "lru"  # the least recently used
    WORTH = "worth"  # the least likely to be used again, as learned; believes hints of sessions


class StoreWrites(StrEnum):
    """When the store writes blocks from memory to its lower tiers."""

    THROUGH = "through"  # soon after they came
    USED = "used"  # once a prompt has used them
    OFF = "off"  # never: lower tiers are only read


class PlannerMode(StrEnum):
    """The treatment of the planner's decisions."""

    OFF = "off"
    DRY_RUN = "dry-run"  # they are reported and kept
    ON = "on"  # they are carried out too


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address that a server listens on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: its address may change
        return False


def is_template(text: str) -> bool:
    """True if the setting is a chat template itself; false if it is the path of a file."""
    return "{%" in text or "{{" in text


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition, not a switch
    if not holds:
        raise ValueError(message)


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every worker."""

    # Where workers compute. Each gets GPUs of its own, or a part of one: see pools.num_gpus.
    device: DeviceKind = DeviceKind.AUTO
    block_size: Count = 16  # tokens of one block of KV
    weights: WeightFormat = WeightFormat.AUTO  # format of the linear layers
    kv_dtype: KVFormat | None = None  # format of KV in the pools; None: fp32, or bf16 on a GPU
    decode_kv_dtype: KVFormat | None = None  # the same, of decode workers; None: kv_dtype
    kv_wire_dtype: KVFormat | None = None  # format of KV on its way; None: the pool's format
    kv_mib: Count | None = None  # memory of the KV pool; None: depends on the memory that is free
    # Share of its GPU's memory that a worker takes: weights, activations and KV together. Of a part
    # of a GPU it is this share of that part.
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    max_model_len: Count | None = None  # tokens of one request; None: the model's context
    max_batch_tokens: Count | None = None  # tokens of one step; None: 512, or 8192 on a GPU
    # Tokens of one prompt in one step. None: 256, or 8192 on a GPU.
    chunk_tokens: Count | None = None
    max_running: Count | None = None  # sequences that decode at once; None: 64, or 256 on a GPU
    kv_transport: Transport = Transport.AUTO  # the way of KV between workers
    threads: Count | None = None  # torch threads; None: the cores divided among the workers
    # Ranks of one worker that hold a slice of each layer. Each has a device, or is a process on a
    # CPU.
    tp: Count = 1
    pp: Count = 1  # stages of one worker, of consecutive layers; it has tp x pp ranks
    ep: Count = 1  # 1, or tp: then the ranks of a stage hold whole experts instead of slices of all
    decode_tp: Count | None = None  # `tp` of decode workers; None: as of others
    decode_pp: Count | None = None  # `pp` of decode workers; None: as of others
    decode_ep: Count | None = None  # `ep` of decode workers; None: as of others
    speculate: Speculate = Speculate.OFF  # the source of tokens that the model verifies
    draft_model: str | None = None  # directory of the model that `speculate` uses
    max_draft_tokens: Count = 8  # guessed tokens of one sequence in one step
    publish_token_ids: bool = False  # block events, which every subscriber reads, hold tokens
    # A worker whose step takes longer ends, so that another one starts. None: no limit.
    step_timeout_s: Positive | None = 60.0
    # Peak of the hardware of one worker, for /metrics: 10¹² flops a second, in the format that it
    # computes in. None: its use is not shown as a share.
    peak_tflops: Positive | None = None
    # The same, of the memory that holds the weights: 10⁹ bytes a second.
    peak_gb_per_s: Positive | None = None

    @property
    def draft_path(self) -> Path | None:
        """The directory of the draft model, if speculation uses one."""
        if self.draft_model is None or self.speculate not in WITH_DRAFT:
            return None
        return Path(self.draft_model)

    def __post_init__(self) -> None:
        _require(
            self.speculate is not Speculate.DRAFT or self.draft_model is not None,
            "worker.speculate = draft needs worker.draft_model",
        )
        decode_tp = self.tp if self.decode_tp is None else self.decode_tp
        decode_ep = self.ep if self.decode_ep is None else self.decode_ep
        _require(
            self.ep in (1, self.tp) and decode_ep in (1, decode_tp),
            "worker.ep must be 1 or worker.tp: experts are shared by the ranks of a stage",
        )
        _require(
            self.max_running is None
            or self.max_batch_tokens is None
            or self.max_running <= self.max_batch_tokens,
            "worker.max_running must not exceed worker.max_batch_tokens",
        )


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of admission and placement of requests."""

    policy: RouterPolicy = RouterPolicy.SLO  # the choice of workers for a request
    seed: int | None = None  # for the choice between equal workers; None: random
    max_queue: Count = 1024  # requests waiting for a worker
    queue_timeout_s: Positive = 60.0  # a request that waits longer is refused
    # A short prompt passes a longer one of the same key and priority that came this many seconds
    # earlier, for each second of work by which they differ. 0: the order of arrival.
    queue_patience: NotNegative = 4.0
    # A key that holds less than another key waits this long for room. Then the youngest sequences
    # of the other are put back. None: it waits until they end.
    turn_after_s: Positive | None = 1.0
    silence_s: Positive = 3.0  # a worker that sends nothing for this long counts as lost
    stuck_step_s: Positive = 5.0  # a longer step, far above its prediction, counts as lost too
    # A prompt that takes this many times its predicted time is computed on a second worker as well;
    # the first one to finish goes on. None: no second worker.
    hedge_after: Positive | None = 3.0
    progress_timeout_s: Positive = 60.0  # a worker without news of a request for this long loses it
    # Progress_timeout_s grows by prompt tokens / this
    slowest_prefill_tokens_per_s: Positive = 100.0
    max_attempts: Count = 5  # placements of one request
    prefill_backlog_s: Positive = 0.05  # a prefill worker with more to do gets no further prompt
    prefill_backlog_tokens: Count = 1024  # the same, while the worker's speed is unknown
    offer_timeout_s: Positive = 1.0  # longest wait of a prompt for the offer of a cached prefix
    # Longest wait if only a worker that cannot pull its KV has room
    move_timeout_s: Positive = 10.0
    # Running sequences move from a full decode worker to one that was started, flipped or paused
    # meanwhile, or to a fluid prefill worker without prompts. False: each stays where it is, unless
    # its worker is to stop decoding.
    balance: bool = True
    balance_gain: Positive = 0.2  # the least difference of their predicted steps, as a share
    # Requests predicted to exceed it are refused; None: no bound
    slo_ttft_s: Positive | None = None
    slo_tpot_s: Positive | None = None  # decode workers are filled only as far as they keep it


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: str = "127.0.0.1"  # the address to listen on
    port: Port = 8000  # port of HTTP; 0: the system chooses
    # The Open Inference Protocol over gRPC, on this port of the same host. None: not served.
    grpc_port: Port | None = None
    # Gateway processes, which share the ports. None: 2 in `baton serve` on 4 or more cores, else 1.
    processes: Count | None = None
    model_name: str | None = None  # name in the API; None: the model's directory
    chat_template: str | None = None  # a file, or the template itself; None: the model's own
    # How the model writes tool calls, by vLLM's names of parsers. auto: as its chat template shows.
    # none: calls in Hermes' form; reasoning stays in the text.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"  # the same, of reasoning
    # Sampling where clients say nothing: generation_config.json's, or none.
    generation_config: GenerationDefaults = GenerationDefaults.AUTO
    keys_file: str | None = None  # API keys: the file of `baton keys`
    # Keys of the operator's own, instead of a keys file: a key or a list. `load_config` puts hashes
    # in their place, "sha256:" and 64 hex digits, which an operator may write too.
    api_key: tuple[str, ...] = ()
    # Requests of each key without limits of its own, over all processes of a port. Without keys,
    # this holds for all clients together. None: no limit.
    requests_per_s: Positive | None = None
    tokens_per_min: Count | None = None  # the same, of prompts and answers
    max_streams: Count | None = None  # the same, of requests in flight
    # Lower numbers are served earlier; clients may ask for none below this
    min_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    max_body_bytes: Count = 8 * 2**20  # most bytes of a request, files aside
    max_choices: Count = 16  # answers to one prompt: `n`, `best_of`
    max_batch_choices: Count = 128  # answers to all prompts of one request
    # File (SQLite) of kept responses, files and batches, which all processes of a machine share.
    # None: in the memory of each process, so that they end with it.
    store: str | None = None
    max_file_bytes: Count = 200 * 2**20  # most bytes of one uploaded file
    max_tenant_file_bytes: Count = 2 * 2**30  # bytes of all files and results of one key
    max_store_bytes: Count = 16 * 2**30  # bytes of all files; the only bound in memory
    # Batches run while no other request does. Beside others they get this share of the places in
    # decode workers. After others they wait for `batch_idle_s` before they take all places.
    batch_share: Share = 0.0
    batch_idle_s: NotNegative = 0.5  # without other requests, before batches take all places
    # Kept responses, of all keys. What was not used for longest goes first.
    max_responses: Count = 20_000
    max_responses_bytes: Count = 256 * 2**20  # bytes of kept responses, of all keys
    max_key_responses: Count = 5_000  # kept responses of one key
    max_key_responses_bytes: Count = 64 * 2**20  # bytes of kept responses of one key
    response_days: Positive = 30.0  # a kept response goes this long after its last use
    max_background_responses: Count = 256  # running at once, in each process
    record_dir: str | None = None  # each process writes its router's events and effects there
    max_connections: Count = 8192  # connections of each process
    max_connections_per_address: Count = 2048  # the same; a proxy counts as one address
    max_head_bytes: Count = 32 * 2**10  # most bytes of a request's line and header fields
    head_timeout_s: Positive = 10.0  # from the first byte or the start to the end of a head
    dashboard: DashboardMode = DashboardMode.ON  # landing page, dashboard, playground
    open_to_all: bool = False  # needed to listen beyond this machine without keys
    # Origins, as https://chat.example.com, of pages whose scripts may use the API. "*": all.
    cors_origins: tuple[str, ...] = ()
    # Names that clients without keys may use, beside localhost, addresses and `host`. "*.NAME": all
    # names below NAME. "*": any name, which permits DNS rebinding.
    allowed_hosts: tuple[str, ...] = ()
    tls_cert: str | None = None  # PEM; with `tls_key` the gateway serves HTTPS, and no HTTP
    tls_key: str | None = None  # PEM; new files are read without a restart
    tls_client_ca: str | None = None  # PEM; clients need a certificate that one of these signed
    # OpenTelemetry: the URL of a collector, as http://127.0.0.1:4318/v1/traces. None: no traces.
    trace_endpoint: str | None = None
    trace_share: Share = 1.0  # part of the requests without a trace that get one
    # When the gateway stops, running answers may take this long
    drain_timeout_s: NotNegative = 30.0

    @property
    def needs_key(self) -> bool:
        """True if clients need a key."""
        return self.keys_file is not None or bool(self.api_key)

    @property
    def shares_port(self) -> bool:
        """True if several processes listen on the port."""
        return self.processes is not None and self.processes > 1

    @property
    def key_hashes(self) -> tuple[str, ...]:
        """SHA-256 hashes of the operator's API keys, as 64 hex digits."""
        return tuple(text.removeprefix("sha256:") for text in self.api_key)

    def __post_init__(self) -> None:
        _require(
            self.grpc_port in (None, 0) or self.grpc_port != self.port,
            "gateway.grpc_port must not be gateway.port",
        )
        _require(
            self.trace_endpoint is None or self.trace_endpoint.startswith(("http://", "https://")),
            "gateway.trace_endpoint must be the URL of a collector: http://HOST:4318/v1/traces",
        )
        _require(
            is_loopback(self.host) or self.needs_key or self.open_to_all,
            f"gateway.host = {self.host} can be reached from other machines, and no key is needed:"
            " make one with `baton keys add NAME` and set gateway.keys_file (--keys-file), give one"
            " as gateway.api_key (--api-key), or say"
            " gateway.open_to_all = true (--open-to-all) if everyone may use this server",
        )
        _require(
            self.keys_file is None or not self.api_key,
            "gateway.keys_file and gateway.api_key do not go together: put all keys into the file",
        )
        _require(
            all(_KEY_HASH.fullmatch(text) for text in self.api_key),
            "gateway.api_key holds hashes of keys: sha256: and 64 hex digits",
        )
        _require(
            (self.tls_cert is None) == (self.tls_key is None),
            "gateway.tls_cert and gateway.tls_key go together",
        )
        _require(
            self.tls_client_ca is None or self.tls_cert is not None,
            "gateway.tls_client_ca needs gateway.tls_cert",
        )
        for origin in self.cors_origins:
            _require(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                f"gateway.cors_origins has {origin!r}; an origin is SCHEME://HOST in lower case,"
                " with a port if it is not the scheme's own, and no path",
            )
        for host in self.allowed_hosts:
            _require(
                host == "*" or _HOST.fullmatch(host) is not None,
                f"gateway.allowed_hosts has {host!r}; a host is a name in lower case, without a"
                ' port, "*.NAME" or "*"',
            )
        for name in ("keys_file", "store", "tls_cert", "tls_key", "tls_client_ca"):
            value = getattr(self, name)
            _require(
                value is None or value.startswith(("/", "~")),
                f"gateway.{name} must be an absolute path, or begin with ~",
            )


class PoolsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of workers, and where Ray may put them."""

    # Workers at the start; None: 1, or 0 if there are mixed ones
    prefill: CountOrZero | None = None
    decode: CountOrZero | None = None  # like `prefill`
    mixed: CountOrZero = 0  # workers that do both
    # Workers of one pool take work of the other one that would wait there: decode workers compute
    # prompts, idle prefill workers decode. Never if the pools store KV in different formats, send
    # it in another one, or are split into ranks in different ways: answers would differ.
    fluid: bool = True
    # How many times as long prompts may make a step of sequences without a bound on TPOT, in a
    # fluid pool.
    stretch: Annotated[float, Meta(gt=1)] = 6.0
    max_workers: Count | None = None  # None: as GPUs or cores allow, and at least 4
    # Workers with the model loaded that wait to take the place of a dead one
    spares: CountOrZero = 0
    drain_timeout_s: Positive = 60.0  # a drained worker that still holds sequences then stops
    steady_s: Positive = 60.0  # a worker that ran longer restarts at once, others ever later
    update_timeout_s: Positive = 900.0  # an update without progress for this long is given up
    # All workers of a pool with a KV format of its own have been dead for this long: a worker with
    # the other format stands in for them. Answers go on, but their tokens may differ.
    inexact_after_s: Positive = 5.0
    # GPUs of one worker: whole ones, or a part of one. None: 1 if workers compute on GPUs, else 0.
    num_gpus: NotNegative | None = None
    prefill_resource: str | None = None  # a custom resource of nodes where prefill workers start
    decode_resource: str | None = None  # where decode and mixed workers start
    placement: Spread = Spread.PACK  # over the nodes of a cluster
    price_per_hour: NotNegative | None = None  # price of one worker, in any currency; for /metrics

    def __post_init__(self) -> None:
        _require(
            self.num_gpus is None or self.num_gpus <= 1 or float(self.num_gpus).is_integer(),
            "pools.num_gpus must be whole, or less than 1",
        )


class UpdateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How `baton update` shifts requests to a version that takes over, and when it is given up."""

    canary: tuple[int, ...] = ()  # shares of new requests that come first, one by one, per cent
    hold_s: NotNegative = 60.0  # each of these shares lasts at least this long
    min_requests: Count = 20  # ended requests before the new version is judged
    max_failed: NotNegative = 0.02  # share of its requests; it is given up if more fail
    # Share of its answers that miss `router.slo_*`, are refused or hang, above the
    # share of other versions.
    max_late: NotNegative = 0.1

    def __post_init__(self) -> None:
        check_canary(self.canary)


def check_canary(shares: Sequence[int]) -> None:
    """Raises ConfigError unless the shares rise from above 0 to below 100."""
    rising = all(a < b for a, b in pairwise(shares))
    _require(
        rising and all(0 < share < 100 for share in shares),
        f"update.canary must rise between 1 and 99, not {list(shares)}",
    )


class PlannerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds and times of the planner, which changes the pools with the load.

    It aims at `router.slo_ttft_s` and `router.slo_tpot_s`. Mixed workers do not count.
    """

    mode: PlannerMode = PlannerMode.OFF  # at the start; `baton planner` changes it
    min_prefill: Count = 1  # workers
    max_prefill: int | None = None  # workers; None: no bound
    min_decode: Count = 1  # workers
    max_decode: int | None = None  # workers; None: no bound
    min_workers: Count = 2  # workers of both pools
    max_workers: int | None = None  # None: the number of workers stays as ordered
    cool_down_s: NotNegative = 15.0  # a pool that grew gives no worker back for this long
    # Both pools must lack workers for this long before more are ordered
    grow_after_s: NotNegative = 30.0
    # Both must have too many for this long before some are stopped
    shrink_after_s: NotNegative = 300.0

    def __post_init__(self) -> None:
        for what in ("prefill", "decode", "workers"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            _require(
                most is None or most >= least,
                f"planner.max_{what} must not be below planner.min_{what}",
            )
        _require(
            self.max_workers is None or self.max_workers >= self.min_prefill + self.min_decode,
            "planner.max_workers must not be below planner.min_prefill + planner.min_decode",
        )


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is served beside the main one. NAME is its name in requests."""

    model: str  # directory, GGUF file, hf://org/name@revision, pypi:name==version, s3://…, gs://…
    prefill: CountOrZero | None = None  # workers of its own; None: 1, or 0 if there are mixed ones
    decode: CountOrZero | None = None  # like `prefill`
    mixed: CountOrZero = 0  # workers that do both
    # After this long without a request its workers end, and the next request starts them again.
    # It gives way sooner if another model needs the room. None: it keeps its workers.
    idle_s: Positive | None = None
    # Settings of its workers; `[worker]` holds where `[models.NAME.worker]` says nothing.
    worker: WorkerConfig = WorkerConfig()


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store of KV, which keeps prefixes beyond their workers: one for each node and version."""

    memory_mib: CountOrZero = 0  # memory of the store's KV; 0: there is no store
    disk: str | None = None  # a directory on a local disk; None: no blocks on disk
    disk_gib: Positive = 64.0  # most KV on disk
    objects: str | None = None  # a URL as fsspec takes it: s3://bucket/folder; None: no objects
    objects_gib: Positive = 1024.0  # most KV in objects
    # A file with the secret that keys hashes of blocks, made if missing. Later deployments find
    # blocks with it alone. None: `salts` in `disk`, or else a new secret at each start.
    salts: str | None = None
    eviction: StoreEviction = StoreEviction.WORTH  # the choice of blocks that leave a full tier
    writes: StoreWrites = StoreWrites.THROUGH  # when blocks go from memory to disk and objects
    copies: CountOrZero = 2  # stores that may hold a block; the others do not take it
    # New blocks are taken from workers no faster. None: in a quarter of the time, at any speed.
    take_mib_per_s: Positive | None = None
    pinned_share: Share = 0.1  # part of each tier that one API key may pin

    def __post_init__(self) -> None:
        has_lower = self.disk is not None or self.objects is not None
        _require(
            self.memory_mib > 0 or not has_lower,
            "store.disk and store.objects need store.memory_mib: blocks are loaded into memory",
        )

    @property
    def is_on(self) -> bool:
        """True if there is a store."""
        return self.memory_mib > 0


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's API, by default on loopback."""

    host: str = "127.0.0.1"  # the address to listen on
    port: Port = 0  # port of the operator's API; 0: the system chooses
    name: str | None = None  # name for `--deployment`; None: its ports name it
    # Key for orders; None: a new one at every start, readable by this user alone
    key: Text | None = None


class LogsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The logs of all processes."""

    level: LogLevel = LogLevel.WARNING  # the least level that is logged
    format: LogFormat = LogFormat.TEXT  # format of each line
    # One line for each request to a gateway. "-": with the other log lines. None: not written.
    access: Text | None = None
    audit: Text | None = None  # a file to append operators' orders to, beside the log


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree."""

    worker: WorkerConfig = WorkerConfig()
    router: RouterConfig = RouterConfig()
    gateway: GatewayConfig = GatewayConfig()
    pools: PoolsConfig = PoolsConfig()
    update: UpdateConfig = UpdateConfig()
    planner: PlannerConfig = PlannerConfig()
    store: StoreConfig = StoreConfig()
    admin: AdminConfig = AdminConfig()
    logs: LogsConfig = LogsConfig()
    models: dict[str, ModelConfig] = {}

    def __post_init__(self) -> None:
        _require(len(self.models) <= MAX_MODELS, f"there can be at most {MAX_MODELS} models")
        for name in self.models:
            _require(
                _MODEL_NAME.fullmatch(name) is not None,
                f"models: {name!r} must have 1 to 64 letters, digits, dots, dashes, underscores",
            )
        # Which of the two is the default depends on the device, and is checked once it is known.
        own = self.worker.kv_dtype
        kept = (None, KVFormat.FP32, KVFormat.BF16) if own is None else (None, own)
        _require(
            self.planner.mode is PlannerMode.OFF or self.worker.decode_kv_dtype in kept,
            f"planner.mode = {self.planner.mode} needs workers that can be flipped, and these"
            " keep their KV: worker.decode_kv_dtype must not differ from worker.kv_dtype",
        )


def load_config(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Config:
    """Reads the configuration from a TOML file, the environment and flags such as "worker.kv_mib":
    64.

    A flag that is None is not set. Raises ConfigError.
    """
    tree: dict[str, Any] = read_toml(path) if path is not None else {}
    for key, value in environment.items():
        if _is_setting(key):
            names = key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _set(tree, names, _list_or_text(value))
    for key, value in flags.items():
        if value is not None:
            _set(tree, key.split("."), value)
    return config_of(tree, source="configuration", is_text=True)


def config_of(tree: dict[str, Any], *, source: str, is_text: bool = False) -> Config:
    """Checks a configuration that was read from a source. Raises ConfigError, with one line for
    each error.

    Each line names the source. With `is_text`, values may be texts that must still be parsed.
    """
    section = tree.get("gateway")
    if isinstance(section, dict) and "api_key" in section:
        tree = {**tree, "gateway": {**section, "api_key": _hashed(section["api_key"])}}

    def check(part: dict[str, Any]) -> Config:
        if isinstance(models := part.get("models"), dict):
            worker = part.get("worker", {})
            # Models inherit [worker], whose errors must be found first.
            check({name: section for name, section in part.items() if name != "models"})
            merged = {name: _with_worker(own, worker) for name, own in models.items()}
            part = {**part, "models": merged}
        return msgspec.convert(_unset(part, Config), Config, strict=not is_text)

    try:
        return check(tree)
    except msgspec.ValidationError as error:
        found = [f"{source}: {each}{hint_of(each, Config)}" for each in faults_of(tree, check)]
        raise ConfigError("\n".join(dict.fromkeys(found))) from error


def _unset(tree: Any, kind: Any) -> Any:
    """Returns the tree with None in place of UNSET, at each key whose type allows None."""
    if isinstance(tree, dict) and get_origin(kind) is dict:
        return {key: _unset(value, get_args(kind)[1]) for key, value in tree.items()}
    if not (isinstance(tree, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        may_be_none = NoneType in get_args(kind)
        return None if may_be_none and tree == UNSET else tree
    types = get_type_hints(kind)
    return {key: _unset(value, types.get(key)) for key, value in tree.items()}


def _with_worker(model: Any, worker: Any) -> Any:
    """Fills in a model's worker settings: keys that the model does not set come from `[worker]`."""
    own = model.get("worker", {}) if isinstance(model, dict) else None
    if not isinstance(own, dict) or not isinstance(worker, dict):
        return model  # its type is wrong: a later check reports that
    return {**model, "worker": {**worker, **own}}


def _hashed(keys: Any) -> Any:
    """Replaces each API key by its hash. Raises ConfigError, whose message does not contain the
    key.
    """
    if isinstance(keys, str):
        keys = [keys]
    if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
        return keys  # the type is wrong: a later check reports that
    for key in keys:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"gateway.api_key: a key has 1 to {MAX_KEY_BYTES} printable ASCII characters"
                " and no space"
            )
    hashed = (key if _KEY_HASH.fullmatch(key) else f"sha256:{_hash_of(key)}" for key in keys)
    return list(dict.fromkeys(hashed))


def _hash_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def remove_environment(environment: MutableMapping[str, str]) -> None:
    """Removes the environment variables that `load_config` reads, so that child processes inherit
    no API key.
    """
    for key in list(environment):
        if _is_setting(key):
            del environment[key]


def _is_setting(key: str) -> bool:
    return key.startswith(ENVIRONMENT_PREFIX) and "__" in key


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file into a dict. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _list_or_text(value: str) -> Any:
    """Returns the value of an environment variable. Lists are written in TOML's syntax: `["a",
    "b"]`.
    """
    if not value.startswith("["):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"configuration: {'.'.join(path)} is set twice")
    tree[path[-1]] = value
