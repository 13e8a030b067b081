"""`baton simulate`: plays a trace on a simulated cluster. Parses, prints, writes.

baton simulate --trace conversation_trace.jsonl --hardware h200-qwen3-32b-tp2 --prefill 6 --decode 2
baton simulate --trace conversation_trace.jsonl --hardware h200-qwen3-32b-tp2 --prefill 6 \\
    --decode 2 --store-memory-gib 1024 --store-disk-gib 8192 --store-take-gib-per-s 10
"""

import random
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.client.load import SloBounds
from bench.common.command import JsonOption, PlotOption, SeedOption, printed_errors, publish
from bench.common.machine import report_here
from bench.common.plots import plot_load, require_matplotlib
from bench.common.report import Scalar, results_of
from bench.common.series import panels_of
from bench.simulator.cluster import MAX_ANSWER_TOKENS, SimulatedPools, SimulationSetup, simulate
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
from engine.config import PoolsConfig, RouterConfig, RouterPolicy, StoreEviction, StoreWrites
from engine.errors import ConfigError
from router.machine.machine import RouterMachine

SYNTHETIC = "synthetic"
NUM_SYNTHETIC = 1000  # requests of such a trace by default
MAX_KEPT = 100_000  # by default; some 5 kB each


def simulate_command(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    trace: Annotated[
        str, typer.Option(help="Mooncake JSONL, Azure CSV or Baton's own; or `synthetic`.")
    ],
    hardware_: Annotated[
        str,
        typer.Option("--hardware", help=f"A profile: its file, or one of {', '.join(PROFILES)}."),
    ] = "h200-qwen3-8b",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    mixed: Annotated[int, typer.Option(min=0, help="Workers of both roles.")] = 0,
    fluid: Annotated[bool, typer.Option(help="Pools take each other's work.")] = True,
    stretch: Annotated[
        float, typer.Option(min=1.01, help="Of steps by prompts, in fluid pools.")
    ] = PoolsConfig().stretch,
    join: Annotated[
        float | None, typer.Option(min=0.0, help="The last decode worker joins at this second.")
    ] = None,
    balance: Annotated[
        bool, typer.Option(help="Running sequences move to decode workers that joined late.")
    ] = True,
    policy: Annotated[
        RouterPolicy, typer.Option(help="How workers are chosen.")
    ] = RouterPolicy.SLO,
    speed_up: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    shorten: Annotated[int, typer.Option(min=1, help="Divisor of all lengths.")] = 1,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Play only the first requests.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests/s of a synthetic trace.")] = 3.4,
    families: Annotated[int, typer.Option(min=1, help="System prompts of a synthetic trace.")] = 1,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of a worker.", show_default="profile")
    ] = None,
    latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Of one message, in milliseconds.")
    ] = 0.2,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Limit that clients send with each request.")
    ] = MAX_ANSWER_TOKENS,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0.0, help="Bound on TTFT.")] = 5000.0,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0.0, help="Bound on TPOT.")] = 25.0,
    reject: Annotated[
        bool, typer.Option(help="Refuse requests that are predicted to miss a bound.")
    ] = False,
    goodput_requests: Annotated[
        int,
        typer.Option(min=0, help="Requests for DistServe's goodput; 0 leaves it out."),
    ] = 1000,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 100_000,
    queue_timeout_s: Annotated[float, typer.Option(help="Longest wait of a request.")] = 3600.0,
    gpu_hour_usd: Annotated[
        float | None, typer.Option(min=0.0, help="Price.", show_default="profile")
    ] = None,
    node_workers: Annotated[
        int, typer.Option(min=1, help="Workers of a node, which has one store.")
    ] = 8,
    store_memory_gib: Annotated[
        float, typer.Option(min=0.0, help="KV in memory of each store; 0: no stores.")
    ] = 0.0,
    store_disk_gib: Annotated[
        float, typer.Option(min=0.0, help="KV on the disk of each store; 0: no disk.")
    ] = 0.0,
    store_disk_read_gib_per_s: Annotated[float, typer.Option(help="Reads of a disk.")] = 6.0,
    store_disk_write_gib_per_s: Annotated[float, typer.Option(help="Writes to a disk.")] = 3.0,
    store_disk_latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Of each read and write of a disk.")
    ] = 0.2,
    store_objects_gib: Annotated[
        float, typer.Option(min=0.0, help="KV in objects of each store; 0: no objects.")
    ] = 0.0,
    store_objects_gib_per_s: Annotated[
        float, typer.Option(help="Reads, and writes, of objects.")
    ] = 1.0,
    store_objects_latency_ms: Annotated[
        float, typer.Option(min=0.0, help="Of each read and write of an object.")
    ] = 50.0,
    store_eviction: Annotated[
        StoreEviction, typer.Option(help="Which blocks leave a full tier of a store.")
    ] = StoreEviction.WORTH,
    store_writes: Annotated[
        StoreWrites, typer.Option(help="When blocks go to disk and objects.")
    ] = StoreWrites.THROUGH,
    store_copies: Annotated[
        int, typer.Option(min=1, help="Stores that may hold a block in memory.")
    ] = 2,
    store_take_gib_per_s: Annotated[
        float, typer.Option(help="A store takes blocks from workers no faster.")
    ] = 0.5,
    stream: Annotated[
        bool | None,
        typer.Option(
            help="Keep sums of the requests of a synthetic trace, but none of them.",
            show_default=f"if there are more than {MAX_KEPT:,}, and no option needs them",
        ),
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
    plot: PlotOption = None,
    write_trace_: Annotated[
        Path | None, typer.Option("--write-trace", help="Write the played trace here.")
    ] = None,
    write_hardware_: Annotated[
        Path | None, typer.Option("--write-hardware", help="Write the profile here.")
    ] = None,
) -> None:
    """Play a trace against a simulated cluster and report latency, goodput, hits and cost."""
    with printed_errors():
        if plot:
            require_matplotlib()
        profile = hardware_named(hardware_)
        if kv_blocks is not None:
            profile = msgspec.structs.replace(profile, num_blocks=kv_blocks)
        sizes = StoreSizes(store_memory_gib, store_disk_gib, store_objects_gib)
        disk = TierPrice(
            store_disk_read_gib_per_s * GIB,
            store_disk_write_gib_per_s * GIB,
            store_disk_latency_ms / 1000,
            DISK_REQUESTS,
        )
        objects = TierPrice(
            store_objects_gib_per_s * GIB,
            store_objects_gib_per_s * GIB,
            store_objects_latency_ms / 1000,
            OBJECT_REQUESTS,
        )
        stores = None
        if sizes != NO_STORE:
            stores = SimulatedStores(
                *sizes.blocks(profile.layout),
                disk=disk,
                objects=objects,
                node_workers=node_workers,
                eviction=store_eviction,
                writes=store_writes,
                copies=store_copies,
                take_bytes_per_s=store_take_gib_per_s * GIB,
            )
        chat = Chat(rate_per_s=rate, families=families)
        changes = speed_up != 1.0 or shorten != 1
        uses_requests = bool(plot or write_trace_ or changes or join)
        if stream is None:
            stream = streams_by_default(
                trace, requests, uses_requests=uses_requests or goodput_requests > 0
            )
        if stream:
            _check_stream(trace, uses_requests=uses_requests)
            played = Trace(SYNTHETIC, MOONCAKE_BLOCK_TOKENS, ())
        else:
            played = _trace(trace, chat, requests=requests, seed=seed)
            played = played.sped_up(speed_up).shortened(shorten)
        setup = SimulationSetup(
            profile,
            _pools(prefill, decode, mixed, join),
            latency_s=latency_ms / 1000,
            max_answer_tokens=max_tokens,
            stretch=stretch if fluid else None,
            joins_s=join,
            stores=stores,
        )
        slo = SloBounds.from_ms(slo_ttft_ms, slo_tpot_ms)
        router = RouterConfig(
            policy=policy,
            seed=seed,
            max_queue=max_queue,
            queue_timeout_s=queue_timeout_s,
            slo_ttft_s=slo.ttft_s if reject else None,
            slo_tpot_s=slo.tpot_s,
            balance=balance,
        )
        if write_trace_:
            write_trace(played, write_trace_)
        if write_hardware_:
            write_hardware(profile, write_hardware_)
        price = profile.usd_per_gpu_hour if gpu_hour_usd is None else gpu_hour_usd
        if stream:
            number = requests or NUM_SYNTHETIC
            asked = islice(conversations(chat, random.Random(seed)), number)
            figures = streamed_figures(
                played, asked, setup, RouterMachine(router), slo, usd_per_gpu_hour=price
            )
        else:
            number = len(played.requests)
            run = simulate(played, setup, RouterMachine(router))
            figures = figures_of(run, slo, usd_per_gpu_hour=price)
            figures |= distserve_goodput(
                played.first(goodput_requests),
                lambda sped_up: simulate(sped_up, setup, RouterMachine(router)),
                slo,
                gpus=setup.pools.total * profile.gpus,
            )
        report = report_here(
            "simulate",
            seed=seed,
            config=_config(played, number, setup, router, speed_up),
            results=results_of([figures]),
        )
        title = _title(played, number, setup, router)
        publish(report, json, title=title)
        if plot and not stream:
            plot_load(
                series_ms(run),
                panels_of(spans_of(run), bound_ttft_ms=slo_ttft_ms, bound_tpot_ms=slo_tpot_ms),
                plot,
                title=title,
                bounds_ms={"TTFT": slo_ttft_ms, "TPOT": slo_tpot_ms},
            )


def streams_by_default(trace: str, requests: int | None, *, uses_requests: bool) -> bool:
    """True if requests are not kept by default: a long synthetic trace, and no option uses them."""
    return trace == SYNTHETIC and (requests or NUM_SYNTHETIC) > MAX_KEPT and not uses_requests


def _trace(name: str, chat: Chat, *, requests: int | None, seed: int) -> Trace:
    if name == SYNTHETIC:
        return synthetic(chat, requests or NUM_SYNTHETIC, random.Random(seed))
    read = read_trace(Path(name))
    return read if requests is None else read.first(requests)


def _check_stream(trace: str, *, uses_requests: bool) -> None:
    """Raises ConfigError if an option needs the requests, which a stream does not keep."""
    if trace != SYNTHETIC or uses_requests:
        raise ConfigError(
            "--stream is for a synthetic trace as it is: "
            "without --plot, --write-trace, --speed-up, --shorten and --join"
        )


def _pools(prefill: int, decode: int, mixed: int, joins_s: float | None) -> SimulatedPools:
    """Returns the pools. Raises ConfigError without workers of either role, also before a join."""
    pools = SimulatedPools(prefill, decode, mixed)
    if not (pools.prefill or pools.mixed) or not (pools.decode or pools.mixed):
        raise ConfigError("a cluster needs workers that prefill and workers that decode")
    if joins_s is not None and (not decode or decode + mixed < 2):
        raise ConfigError("a decode worker that joins late needs another worker that decodes")
    return pools


def _config(
    trace: Trace, number: int, setup: SimulationSetup, router: RouterConfig, speed_up: float
) -> dict[str, Scalar]:
    profile: HardwareProfile = setup.hardware
    return {
        "trace": trace.name,
        "requests": number,
        "speed_up": speed_up,
        "block_tokens": trace.block_tokens,
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
    """Returns the settings of the stores, flat; nothing without stores."""
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


def _title(trace: Trace, number: int, setup: SimulationSetup, router: RouterConfig) -> str:
    pools = setup.pools
    parts = [f"{pools.prefill} prefill", f"{pools.decode} decode"]
    if pools.mixed:
        parts.append(f"{pools.mixed} mixed")
    return (
        f"simulated: {number} requests of {trace.name} on {' + '.join(parts)} "
        f"× {setup.hardware.name}{_stores_in(setup)}, policy {router.policy}"
    )


def _stores_in(setup: SimulationSetup) -> str:
    """Returns the stores as a part of the title."""
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
