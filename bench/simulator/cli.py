"""`baton simulate`: plays a trace on a simulated cluster. Parses options, prints, and writes files.

baton simulate --trace conversation_trace.jsonl --hardware h200-qwen3-32b-tp2 --prefill 6 --decode 2
baton simulate --trace conversation_trace.jsonl --hardware h200-qwen3-32b-tp2 --prefill 6 \\
    --decode 2 --store-memory-gib 1024 --store-disk-gib 8192 --store-take-gib-per-s 10
"""

import random
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.client.load import SloBounds
from bench.common.command import JsonOption, PlotOption, SeedOption, printed_errors, publish
from bench.common.plots import panels_of, plot_load, require_matplotlib
from bench.common.report import Figure, Scalar, report_here, results_of
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRun,
    SimulationSetup,
    simulate,
)
from bench.simulator.goodput import distserve_goodput
from bench.simulator.hardware import PROFILES, HardwareProfile, hardware_named, write_hardware
from bench.simulator.results import figures_of, series_ms, spans_of, streamed_figures
from bench.simulator.tiers import (
    DISK_REQUESTS,
    GIB,
    NO_STORE,
    OBJECT_REQUESTS,
    SimulatedStores,
    StoreSizes,
    TierPrice,
)
from bench.simulator.traces import (
    MOONCAKE_BLOCK_TOKENS,
    Chat,
    Trace,
    conversations,
    read_trace,
    synthetic,
    write_trace,
)
from engine.command_options import (
    SettingOption,
    Settings,
    expanded,
    options_of,
    with_defaults,
)
from engine.config import PoolsConfig, RouterConfig, StoreConfig, load_config
from engine.errors import ConfigError
from router.machine.machine import RouterMachine

SYNTHETIC = "synthetic"
NUM_SYNTHETIC = 1000  # default number of requests of a synthetic trace
MAX_KEPT = 100_000  # default number of requests that are kept in memory, with some 5 kB each


@dataclass(frozen=True)
class PlayedLoad:
    """Options of the trace to play."""

    trace: Annotated[
        str, typer.Option(help="Mooncake JSONL, Azure CSV or Baton's own; or `synthetic`.")
    ]
    speed_up: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0
    shorten: Annotated[int, typer.Option(min=1, help="Divisor of all lengths.")] = 1
    requests: Annotated[int | None, typer.Option(min=1, help="Play only the first requests.")] = (
        None
    )
    rate: Annotated[float, typer.Option(help="Requests/s of a synthetic trace.")] = 3.4
    families: Annotated[int, typer.Option(min=1, help="System prompts of a synthetic trace.")] = 1
    seed: SeedOption = 0
    goodput_requests: Annotated[
        int, typer.Option(min=0, help="Requests for DistServe's goodput; 0 leaves it out.")
    ] = 1000
    stream: Annotated[
        bool | None,
        typer.Option(
            help="Keep sums of the requests of a synthetic trace, but none of them.",
            show_default=f"if there are more than {MAX_KEPT:,}, and no option needs them",
        ),
    ] = None

    @property
    def chat(self) -> Chat:
        """Returns the shape of the conversations of a synthetic trace."""
        return Chat(rate_per_s=self.rate, families=self.families)

    @property
    def is_changed(self) -> bool:
        """Returns True if the trace's rate or lengths are changed by options."""
        return self.speed_up != 1.0 or self.shorten != 1

    def streams(self, *, uses_requests: bool) -> bool:
        """Returns True if requests are not kept in memory. Raises ConfigError if an option needs
        the requests.

        By default, a long synthetic trace is not kept, if no option needs its requests.
        """
        if self.stream is None:
            is_long = self.trace == SYNTHETIC and (self.requests or NUM_SYNTHETIC) > MAX_KEPT
            return is_long and not uses_requests and not self.goodput_requests
        if self.stream and (self.trace != SYNTHETIC or uses_requests):
            raise ConfigError(
                "--stream is for a synthetic trace as it is: "
                "without --plot, --write-trace, --speed-up, --shorten and --join"
            )
        return self.stream

    def read(self) -> Trace:
        """Returns the trace with the changes of the options."""
        if self.trace == SYNTHETIC:
            read = synthetic(self.chat, self.requests or NUM_SYNTHETIC, random.Random(self.seed))
        else:
            read = read_trace(Path(self.trace))
            read = read if self.requests is None else read.first(self.requests)
        return read.sped_up(self.speed_up).shortened(self.shorten)


@dataclass(frozen=True)
class ClusterOptions:
    """Options of the simulated machines and of their clients."""

    hardware: Annotated[
        str, typer.Option(help=f"A profile: its file, or one of {', '.join(PROFILES)}.")
    ] = "h200-qwen3-8b"
    join: Annotated[
        float | None, typer.Option(min=0.0, help="The last decode worker joins at this second.")
    ] = None
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of a worker.", show_default="profile")
    ] = None
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Of one message, in milliseconds.")] = (
        0.2
    )
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Limit that clients send with each request.")
    ] = MAX_ANSWER_TOKENS
    gpu_hour_usd: Annotated[
        float | None, typer.Option(min=0.0, help="Price.", show_default="profile")
    ] = None

    def profile(self) -> HardwareProfile:
        """Returns the profile of the workers."""
        found = hardware_named(self.hardware)
        if self.kv_blocks is not None:
            found = msgspec.structs.replace(found, num_blocks=self.kv_blocks)
        return found

    def priced(self, profile: HardwareProfile) -> HardwareProfile:
        """Returns the profile with the GPU price of the options."""
        if self.gpu_hour_usd is None:
            return profile
        return msgspec.structs.replace(profile, usd_per_gpu_hour=self.gpu_hour_usd)


@dataclass(frozen=True)
class StoreOptions:
    """Options of the simulated stores."""

    node_workers: Annotated[
        int, typer.Option(min=1, help="Workers of a node, which has one store.")
    ] = 8
    store_memory_gib: Annotated[
        float, typer.Option(min=0.0, help="KV in memory of each store; 0: no stores.")
    ] = 0.0
    store_disk_gib: Annotated[
        float, typer.Option(min=0.0, help="KV on the disk of each store; 0: no disk.")
    ] = 0.0
    store_disk_read_gib_per_s: Annotated[float, typer.Option(help="Reads of a disk.")] = 6.0
    store_disk_write_gib_per_s: Annotated[float, typer.Option(help="Writes to a disk.")] = 3.0
    store_disk_latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Of each read and write of a disk.")
    ] = 0.2
    store_objects_gib: Annotated[
        float, typer.Option(min=0.0, help="KV in objects of each store; 0: no objects.")
    ] = 0.0
    store_objects_gib_per_s: Annotated[
        float, typer.Option(help="Reads, and writes, of objects.")
    ] = 1.0
    store_objects_latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Of each read and write of an object.")
    ] = 50.0
    store_take_gib_per_s: Annotated[
        float, typer.Option(help="A store takes blocks from workers no faster.")
    ] = 0.5

    def stores(self, profile: HardwareProfile, config: StoreConfig) -> SimulatedStores | None:
        """Returns the stores; None if there are none. Raises ConfigError."""
        sizes = StoreSizes(self.store_memory_gib, self.store_disk_gib, self.store_objects_gib)
        objects_rate = self.store_objects_gib_per_s * GIB
        disk = TierPrice(
            self.store_disk_read_gib_per_s * GIB,
            self.store_disk_write_gib_per_s * GIB,
            self.store_disk_latency_ms / 1000,
            DISK_REQUESTS,
        )
        objects = TierPrice(
            objects_rate, objects_rate, self.store_objects_latency_ms / 1000, OBJECT_REQUESTS
        )
        if sizes == NO_STORE:
            return None
        return SimulatedStores(
            *sizes.blocks(profile.layout),
            disk=disk,
            objects=objects,
            node_workers=self.node_workers,
            eviction=config.eviction,
            writes=config.writes,
            copies=config.copies,
            take_bytes_per_s=self.store_take_gib_per_s * GIB,
        )


@dataclass(frozen=True)
class SloOptions:
    """Options of the bounds on latencies."""

    slo_ttft_ms: Annotated[float | None, typer.Option(min=0.0, help="Bound on TTFT.")] = 5000.0
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0.0, help="Bound on TPOT.")] = 25.0
    reject: Annotated[
        bool, typer.Option(help="Refuse requests that are predicted to miss a bound.")
    ] = False

    @property
    def bounds(self) -> SloBounds:
        """Returns the bounds in seconds."""
        return SloBounds.from_ms(self.slo_ttft_ms, self.slo_tpot_ms)


@dataclass(frozen=True)
class OutOptions:
    """Options of the output files."""

    json: JsonOption = None
    plot: PlotOption = None
    write_trace: Annotated[Path | None, typer.Option(help="Write the played trace here.")] = None
    write_hardware: Annotated[Path | None, typer.Option(help="Write the profile here.")] = None


@dataclass(frozen=True)
class Simulation:
    """The results of a simulation."""

    trace: Trace
    num_requests: int
    figures: dict[str, Figure]
    run: SimulatedRun | None  # None: requests were not kept


SETTINGS = with_defaults(
    (
        *options_of("pools", "prefill", "decode", "mixed", "fluid", "stretch"),
        *options_of("router", "balance", "policy", "max_queue", "queue_timeout_s"),
        SettingOption("store.eviction", "store_eviction"),
        SettingOption("store.writes", "store_writes"),
        SettingOption("store.copies", "store_copies"),
    ),
    prefill=1,
    decode=1,
    max_queue=100_000,
    queue_timeout_s=3600.0,
)


@expanded
def simulate_command(
    load: PlayedLoad,
    cluster: ClusterOptions,
    settings: Annotated[Settings, SETTINGS],
    slo: SloOptions,
    store: StoreOptions,
    out: OutOptions,
) -> None:
    """Play a trace against a simulated cluster and report latency, goodput, hits and cost."""
    with printed_errors():
        if out.plot:
            require_matplotlib()
        profile, config = cluster.profile(), load_config(None, {}, settings)
        setup = SimulationSetup(
            cluster.priced(profile),
            _pools(config.pools, cluster.join),
            latency_s=cluster.latency_ms / 1000,
            max_answer_tokens=cluster.max_tokens,
            stretch=config.pools.stretch if config.pools.fluid else None,
            joins_s=cluster.join,
            stores=store.stores(profile, config.store),
        )
        router = msgspec.structs.replace(
            config.router,
            seed=load.seed,
            slo_ttft_s=slo.bounds.ttft_s if slo.reject else None,
            slo_tpot_s=slo.bounds.tpot_s,
        )
        uses_requests = bool(out.plot or out.write_trace or load.is_changed or cluster.join)
        play = _streamed if load.streams(uses_requests=uses_requests) else _played
        done = play(load, setup, router, slo.bounds)
        if out.write_trace:
            write_trace(done.trace, out.write_trace)
        if out.write_hardware:
            write_hardware(profile, out.write_hardware)
        report = report_here(
            "simulate",
            seed=load.seed,
            config=_config(done, setup, router, load.speed_up),
            results=results_of([done.figures]),
        )
        title = _title(done, setup, router)
        publish(report, out.json, title=title)
        if out.plot and done.run is not None:
            ttft_ms, tpot_ms = slo.slo_ttft_ms, slo.slo_tpot_ms
            plot_load(
                series_ms(done.run),
                panels_of(spans_of(done.run), bound_ttft_ms=ttft_ms, bound_tpot_ms=tpot_ms),
                out.plot,
                title=title,
                bounds_ms={"TTFT": ttft_ms, "TPOT": tpot_ms},
            )


def _streamed(
    load: PlayedLoad, setup: SimulationSetup, router: RouterConfig, slo: SloBounds
) -> Simulation:
    """Plays a synthetic trace without keeping requests."""
    trace = Trace(SYNTHETIC, MOONCAKE_BLOCK_TOKENS, ())
    number = load.requests or NUM_SYNTHETIC
    asked = islice(conversations(load.chat, random.Random(load.seed)), number)
    price = setup.hardware.usd_per_gpu_hour
    figures = streamed_figures(
        trace, asked, setup, RouterMachine(router), slo, usd_per_gpu_hour=price
    )
    return Simulation(trace, number, figures, None)


def _played(
    load: PlayedLoad, setup: SimulationSetup, router: RouterConfig, slo: SloBounds
) -> Simulation:
    """Plays a trace. For its goodput, also plays parts of it at other rates."""
    trace = load.read()
    run = simulate(trace, setup, RouterMachine(router))
    figures = figures_of(run, slo, usd_per_gpu_hour=setup.hardware.usd_per_gpu_hour)
    figures |= distserve_goodput(
        trace.first(load.goodput_requests),
        lambda sped_up: simulate(sped_up, setup, RouterMachine(router)),
        slo,
        gpus=setup.pools.total * setup.hardware.gpus,
    )
    return Simulation(trace, len(trace.requests), figures, run)


def _pools(config: PoolsConfig, joins_s: float | None) -> SimulatedPools:
    """Returns the pools. Raises ConfigError if a role has no worker, also before a join."""
    pools = SimulatedPools(config.prefill or 0, config.decode or 0, config.mixed)
    if not (pools.prefill or pools.mixed) or not (pools.decode or pools.mixed):
        raise ConfigError("a cluster needs workers that prefill and workers that decode")
    if joins_s is not None and (not pools.decode or pools.decode + pools.mixed < 2):
        raise ConfigError("a decode worker that joins late needs another worker that decodes")
    return pools


def _config(
    done: Simulation, setup: SimulationSetup, router: RouterConfig, speed_up: float
) -> dict[str, Scalar]:
    profile: HardwareProfile = setup.hardware
    return {
        "trace": done.trace.name,
        "requests": done.num_requests,
        "speed_up": speed_up,
        "block_tokens": done.trace.block_tokens,
        "profile": profile.name,
        "profile_source": profile.source,
        "kv_blocks": profile.num_blocks,
        "prefill": setup.pools.prefill,
        "decode": setup.pools.decode,
        "mixed": setup.pools.mixed,
        "stretch": setup.stretch,
        "join": setup.joins_s,
        "latency_s": setup.latency_s,
        **_store_config(setup.stores),
        **{name: _scalar(getattr(router, name)) for name in router.__struct_fields__},
    }


def _store_config(stores: SimulatedStores | None) -> dict[str, Scalar]:
    """Returns the settings of the stores as a flat mapping, empty without stores."""
    if stores is None:
        return {}
    config: dict[str, Scalar] = {}
    for field in fields(stores):
        value = getattr(stores, field.name)
        if isinstance(value, TierPrice):
            config |= {f"store_{field.name}_{name}": v for name, v in asdict(value).items()}
        else:
            config[f"store_{field.name}"] = _scalar(value)
    return config


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, int | float | None) else str(value)


def _title(done: Simulation, setup: SimulationSetup, router: RouterConfig) -> str:
    pools = setup.pools
    parts = [f"{pools.prefill} prefill", f"{pools.decode} decode"]
    if pools.mixed:
        parts.append(f"{pools.mixed} mixed")
    return (
        f"simulated: {done.num_requests} requests of {done.trace.name} on {' + '.join(parts)} "
        f"× {setup.hardware.name}{_stores_in(setup)}, policy {router.policy}"
    )


def _stores_in(setup: SimulationSetup) -> str:
    """Returns the stores as a part of the report's title."""
    stores = setup.stores
    if stores is None:
        return ""
    block_size, num = setup.hardware.layout.block_size, stores.num_nodes(setup.pools.total)
    sizes = [f"{stores.memory_blocks * block_size * num / 1e6:.3g} M tokens in memory"]
    if stores.disk_blocks:
        sizes.append(f"{stores.disk_blocks * block_size * num / 1e6:.3g} M on disk")
    if stores.object_blocks:
        sizes.append(f"{stores.object_blocks * block_size * num / 1e6:.3g} M in objects")
    return f" with {num} stores of {', '.join(sizes)} in all"
