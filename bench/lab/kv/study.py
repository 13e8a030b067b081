"""Measures the speed of KV transfers, this machine's limits, and the delay of a hand-over.

`bench.lab.kv.cases` lists the transfers and the movers. Hand-overs are measured on `baton serve` as
a user runs it, with one prefill worker and one decode worker of one thread each. Prompts arrive one
at a time, so the figures contain no queueing. Prompts have the same length and different prefixes,
so every block is computed and moved. Figures are from gateway timelines.
"""

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated, ClassVar, Self

import typer
import uvloop

from bench.common.command import RepeatOption, Say, numbers_of, peer_option
from bench.common.options import check_choices, peers_named
from bench.common.report import Missing, notes_on
from bench.common.shapes import SHAPES, cached_checkpoint, shape_named
from bench.lab.experiment import Experiment, Findings
from bench.lab.kv.cases import (
    HEAD_BYTES,
    KIB,
    LAYER_BYTES,
    LIMIT_OF,
    MIB,
    SPLITS,
    TOTAL_BYTES,
    KvPulls,
    mover_of,
    size_name,
)
from bench.lab.kv.contest import Handoffs, KvMeasured, contest, results, warnings
from bench.processes.deployment import Options, serving
from bench.serve.lengths import fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.run import measure as measure_server
from engine.errors import BatonError, ConfigError

BACKENDS = ("shm", "zmq", "nixl")
PEERS = ("mooncake", "nixl")
HANDOFF_TRANSPORTS = ("zmq", "shm")
REQUEST_TIMEOUT_S = 60.0
OUTPUT_LEN = 4  # tokens of an answer; the second one ends the hand-over
KV_MIB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStudy(Experiment):
    """Measure how fast KV moves, beside this machine's limits and peers, and the delay it adds."""

    NAME: ClassVar = "kv"
    QUICK: ClassVar = "Two block sizes, one transport: under 50 s."

    backends: Annotated[str, typer.Option(help="Which of these to measure.")] = ",".join(BACKENDS)
    block_sizes: Annotated[str, typer.Option(help="KiB of a block.")] = "16,64,256,1024"
    shards: Annotated[
        str, typer.Option(help="Pull half of the heads too, in pieces of this many KiB.")
    ] = ""
    handoff: Annotated[bool, typer.Option(help="Measure handoffs of `baton serve` too.")] = True
    shape: Annotated[
        str, typer.Option(help=f"Random weights for the handoff: {', '.join(SHAPES)}.")
    ] = "88m"
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a handoff's prompt.")] = 2048
    repeat: RepeatOption = 7
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None
    total_bytes: int = TOTAL_BYTES

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the wrong option."""
        check_choices("--backends", self.chosen, BACKENDS)
        if not self.sizes:
            raise ConfigError("--block-sizes: none given")
        for size in self.sizes:
            if size < 1 or size % LAYER_BYTES or self.total_bytes % size:
                raise ConfigError(
                    f"--block-sizes must be multiples of {LAYER_BYTES // KIB} KiB that divide"
                    f" {self.total_bytes // MIB} MiB: {size / KIB:g} KiB is none"
                )
        for size in self.pieces:
            if size < 1 or size % HEAD_BYTES or any(block % (4 * size) for block in self.sizes):
                raise ConfigError(
                    f"--shards must be multiples of {HEAD_BYTES // KIB} KiB of which each block"
                    f" has four, or a multiple: {size / KIB:g} KiB is none"
                )
        shape_named(self.shape)
        peers_named(self.peer or (), PEERS)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Returns the backends to measure."""
        return tuple(dict.fromkeys(name for name in self.backends.split(",") if name))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the block sizes in bytes."""
        return tuple(kib * KIB for kib in numbers_of("--block-sizes", self.block_sizes))

    @property
    def pieces(self) -> tuple[int, ...]:
        """Returns the sizes in bytes of a record's pieces, for ranks that hold half of the
        heads.
        """
        return tuple(kib * KIB for kib in numbers_of("--shards", self.shards))

    @property
    def ours(self) -> tuple[str, ...]:
        """Returns Baton's movers: each backend, with whole blocks and with each split of the
        heads.
        """
        splits = [(name, piece) for name in SPLITS for piece in self.pieces]
        return self.chosen + tuple(
            f"{backend}-{name}-{size_name(piece)}"
            for backend in self.chosen
            for name, piece in splits
        )

    @property
    def movers(self) -> tuple[str, ...]:
        """Returns our movers, and the movers that are their limits."""
        return self.ours + tuple(LIMIT_OF[backend] for backend in self.chosen)

    @property
    def pulls(self) -> KvPulls:
        """Returns the pulls that all movers carry out."""
        return KvPulls(self.sizes, self.repeat, self.total_bytes, seed=self.seed)

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        runs = "once" if self.repeat == 1 else f"{self.repeat} times"
        return f"KV transfer, {self.total_bytes // MIB} MiB in scattered blocks, each case {runs}"

    def quick(self) -> Self:
        """Returns a study that takes under 50 s on two cores."""
        return replace(self, block_sizes="64,1024", repeat=min(self.repeat, 3), is_quick=True)

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises DrivenFailed and WrongBytes if a mover fails that works on every
        machine.
        """
        handoffs, not_handed = self._handoffs(say) if self.handoff else ([], [])
        measured = self.run(say)
        # bare NIXL counts as a limit, not as a peer
        peers = [peer for peer in PEERS if peer != "nixl"]
        found = results(
            measured, handoffs, movers=self.movers, peers=dict.fromkeys(self.chosen, peers)
        )
        lines = [*warnings(measured, handoffs), *(missing.warning for missing in not_handed)]
        notes = notes_on(measured.versions, [*measured.missing, *not_handed])
        return Findings(found, lines, config=notes)

    def run(self, say: Say) -> KvMeasured:
        """Measures all movers and returns the results."""
        peers = {peer.name: peer.python for peer in peers_named(self.peer or (), PEERS)}
        names = (*self.movers, *(name for name in peers if name != "nixl"))
        movers = {name: partial(mover_of, name, peers) for name in names}
        return contest(self.pulls, movers, say)

    # ---------------------------------------------------------------- handoffs

    def _handoffs(self, say: Say) -> tuple[list[Handoffs], list[Missing]]:
        """Measures hand-overs over every transport. Returns the timelines and the transports that
        failed.
        """
        if find_spec("torch") is None:
            reason = "a worker needs torch (pip install 'baton-serve[worker]')"
            return [], [Missing("handoff", reason)]
        handoffs, missing = [], []
        for transport in HANDOFF_TRANSPORTS[:1] if self.is_quick else HANDOFF_TRANSPORTS:
            say(f"handing requests over by {transport}")
            try:
                handoffs.append(self.hand_over(transport))
            except BatonError as error:
                missing.append(Missing(f"handoff over {transport}", str(error)))
        return handoffs, missing

    def hand_over(self, transport: str) -> Handoffs:
        """Returns the timelines of all requests over one transport. Raises BatonError if there are
        none.
        """
        checkpoint = cached_checkpoint(self.shape, self.seed)
        options: Options = {
            "--prefill": 1,
            "--decode": 1,
            "--threads": 1,
            "--kv-mib": KV_MIB,
            "--kv-transport": transport,
        }
        with serving(checkpoint, options) as server:
            asked = ServePlan(
                target=ServeTarget(server.url, timeout_s=REQUEST_TIMEOUT_S),
                load=ServeLoad(
                    rate_per_s=float("inf"),
                    num_requests=2 if self.is_quick else 4,
                    concurrency_limit=1,
                    num_warmup=1,
                    num_repeats=1 if self.is_quick else 3,
                ),
                ask=ServeAsk(fixed(self.prompt_len), fixed(OUTPUT_LEN), tokenizer_dir=checkpoint),
                seed=self.seed,
            )
            runs = uvloop.run(measure_server(asked)).runs
        return Handoffs(
            transport=transport,
            repetitions=tuple(
                tuple(answer.timeline_s for answer in run.answers) for run in runs if run.answers
            ),
            num_failed=sum(len(run.failures) for run in runs),
        )
