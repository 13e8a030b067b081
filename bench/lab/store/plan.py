"""The options of `bench store`, and the sizes of its parts. Pure.

    ttft      time to the first token of long prompts: computed, and pulled from the store's memory
              after all workers were killed, and from its disk after everything was stopped
    memory    pulls from a store's slab, pulls between workers, and memcpy
    disk      loads from disk and `fio`, with the same size and depth, in the same directory
    itl       gaps of running streams while a store takes in blocks and writes them to disk, and
              gaps of the same streams without a store
    recovery  the start of a store with many blocks on disk
    turns     clients whose histories exceed the workers' memory, with and without a store

Parts with a deployment use a model of a named shape with random weights. A deployment has one
prefill worker and one decode worker, with one thread each.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self

import typer

from bench.common.command import RepeatOption, peer_option, values_of
from bench.common.options import PeerProgram, peers_named
from bench.common.report import Goals, Scalar
from bench.common.shapes import shape_named
from bench.lab.experiment import Experiment, ShapeOption
from bench.lab.kv.cases import KIB, MIB, KvPulls
from bench.lab.streams import StreamAsk
from engine.errors import ConfigError

BLOCK_TOKENS = 16
KV_BYTES = 4  # bytes of one KV element, as workers on a CPU store it
# block sizes of pulls, in addition to the size of the shape's own blocks
PULL_SIZES = (64 * KIB, 1 * MIB)
PULL_TOTAL_BYTES = 48 * MIB
PULLS_IN_A_REPETITION = 5
DISK_TOTAL_BYTES = 512 * MIB
STREAMS = StreamAsk(at_once=4, input_len=64, output_len=480)
# the prompts whose blocks the store takes in while streams run
PROMPTS = StreamAsk(at_once=1, input_len=512, output_len=1)
DISK_DEPTH = 32  # disk requests in flight
STORE_MIB = 1024
PEERS = ("vllm",)
MIN_PROMPT_LEN = 2 * BLOCK_TOKENS
QUICK_PROMPT_LEN = 512
SERVED: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1, "--threads": 1, "--weights": "int8"}
# arms of `itl`; `again` repeats `off` to measure the noise
OFF, ON, AGAIN = STREAM_ARMS = ("off", "on", "again")


class StorePart(StrEnum):
    """One part of `bench store`."""

    TTFT = "ttft"
    MEMORY = "memory"
    DISK = "disk"
    ITL = "itl"
    RECOVERY = "recovery"
    TURNS = "turns"


ALL_PARTS = ",".join(StorePart)
QUICK_PARTS = (StorePart.TTFT, StorePart.MEMORY, StorePart.DISK, StorePart.RECOVERY)


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Clients in a closed loop. Their prompts grow with each turn."""

    clients: int = 20
    turns: int = 10
    input_len: int = 64  # tokens that a turn adds
    output_len: int = 16
    # KV memory of a worker: 2,700 of the 25,600 tokens of all histories (88 M shape)
    worker_mib: int = 64

    @property
    def num_requests(self) -> int:
        """Returns the number of requests of all clients."""
        return self.clients * self.turns


TURNS = TurnLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan(Experiment):
    """The options of the study, with the values that depend on them."""

    NAME: ClassVar = "store"
    QUICK: ClassVar = "Short prompts; neither streams nor turns: under 50 s."
    GOALS: ClassVar = Goals(
        {
            "ttft_gain/memory": 10.0,
            "ttft_gain/disk": 5.0,
            "pull_of_shm/*": 0.85,
            "disk_load_of_fio": 0.8,
            "itl_p99_ratio/on": 1.05,
            "recovery": 1.0,
        },
        at_most=("itl_p99_ratio/on", "recovery"),
    )

    parts: Annotated[
        str, typer.Option(help=f"What to measure, of {ALL_PARTS}, between commas.")
    ] = ALL_PARTS
    disk: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; else a temporary one.")
    ] = None
    shape: ShapeOption = "88m"
    prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt whose TTFT counts.")] = 2048
    prompts: Annotated[int, typer.Option(min=1, help="How many of these prompts.")] = 5
    recovered: Annotated[int, typer.Option(min=1, help="Blocks that a start finds.")] = 1_000_000
    repeat: RepeatOption = 5
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the wrong option."""
        if not self.chosen:
            raise ConfigError("--parts: none given")
        shape = shape_named(self.shape)
        if not MIN_PROMPT_LEN <= self.prompt_len < shape.max_positions:
            raise ConfigError(
                f"--prompt-len must be {MIN_PROMPT_LEN} to {shape.max_positions - 1},"
                f" not {self.prompt_len}"
            )
        if not self.folder.is_dir():
            raise ConfigError(f"--disk {self.folder} is no directory")
        peers_named(self.peer or (), PEERS)

    @property
    def chosen(self) -> tuple[StorePart, ...]:
        """Returns the parts to measure."""
        return values_of("--parts", self.parts, StorePart, f"a list of {ALL_PARTS}")

    @property
    def folder(self) -> Path:
        """Returns the directory on the measured disk."""
        return self.disk or Path(tempfile.gettempdir())

    @property
    def peers(self) -> tuple[PeerProgram, ...]:
        """Returns the peers that `--peer` names."""
        return peers_named(self.peer or (), PEERS)

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a KV block of the shape."""
        shape = shape_named(self.shape)
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * KV_BYTES
        return BLOCK_TOKENS * per_token

    @property
    def cached_len(self) -> int:
        """Returns the prompt tokens that can be pulled. At least one token must be computed."""
        return (self.prompt_len - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def pulls(self) -> KvPulls:
        """Returns the pulls of the part `memory`. They are those of `bench kv` with the most
        blocks.
        """
        sizes = dict.fromkeys((PULL_SIZES[0], self.block_bytes, PULL_SIZES[1]))
        return KvPulls(
            tuple(sizes),
            self.repeat,
            PULL_TOTAL_BYTES,
            only_whole=True,
            times=PULLS_IN_A_REPETITION,
            seed=self.seed,
        )

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return (
            f"KV store of {STORE_MIB} MiB, prompts of {self.prompt_len} tokens, shape"
            f" {self.shape}, blocks of {self.block_bytes // KIB} KiB"
        )

    def quick(self) -> Self:
        """Returns a study that takes under 50 s: short prompts, and no parts with load."""
        return replace(
            self,
            parts=",".join(part for part in self.chosen if part in QUICK_PARTS),
            prompt_len=min(self.prompt_len, QUICK_PROMPT_LEN),
            prompts=min(self.prompts, 3),
            repeat=min(self.repeat, 2),
            recovered=min(self.recovered, 100_000),
            peer=None,
            is_quick=True,
        )


def store_prompts(plan: StorePlan, vocab: Sequence[int], num: int, *, name: str) -> list[list[int]]:
    """Returns prompts of token ids with different prefixes. `name` makes sets of prompts differ."""
    rng = Random(f"{plan.seed}/{name}")
    return [rng.choices(vocab, k=plan.prompt_len) for _ in range(num)]
