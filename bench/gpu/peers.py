"""Measures peers on the jobs of `bench.gpu`, with the same shape in bf16 and dummy weights.

    python -m bench.gpu --peer vllm=PYTHON

A peer runs in its own process, driven by `bench/peers/driver.py`. It runs before our model is made,
so it has the GPU for itself. The time does not depend on the weights' values: the peer's weights
are dummies, and ours are random.

    prefill_<n>             one prompt of n tokens, to its first token
    decode_b<b>_ctx<n>      steps in which each of b sequences, with n context tokens, gets a token

The peer's figures are reported with our figures for weights and KV in bf16. A peer that fails, or
for which there is no time, is listed as skipped, and the benchmark continues. This module does not
import torch.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from bench.common.options import PeerProgram, environment_of_peers
from bench.common.report import Result
from bench.common.shapes import config_of
from bench.engine.jobs import EngineJob, GpuShape, limits_of, prompts_of
from bench.gpu.session import GpuSession
from bench.processes.driven import Driven, DrivenFailed

PEERS = ("vllm",)
PEER_S = 240.0  # seconds for one peer, which compiles and captures for a minute or two
JOB_NEEDS_S = 20.0
VARIANT = "bf16-dummy"
COMPARED = "bf16-bf16"  # the formats of our weights and KV that are compared
NUM_RUNS = 3
# jobs with a longer context are left out: each run computes the prompts of all sequences again
LARGEST_CONTEXT = 4096
DRIVER = Path(__file__).parents[1] / "peers" / "driver.py"


@dataclass(slots=True)
class PeerFigures:
    """Tokens per second of each peer in each job, and the peers' versions."""

    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def beside(self, results: Iterable[Result]) -> list[Result]:
        """Returns the results, with the peers' figures for the jobs that peers did."""
        return [self._beside(result) for result in results]

    def _beside(self, result: Result) -> Result:
        job, _, formats = result.name.partition("/")
        if formats != COMPARED:
            return result
        theirs = {name: speeds[job] for name, speeds in self.speeds.items() if job in speeds}
        return result.beside(theirs) if theirs else result


def jobs_of(shape: GpuShape) -> list[EngineJob]:
    """Returns all jobs, the fastest first."""
    decodes = [
        EngineJob(f"decode_b{rows}_ctx{n}", rows, n, shape.num_steps, for_peers=True)
        for rows in shape.batches
        for n in shape.contexts
        if n <= LARGEST_CONTEXT
    ]
    decodes.sort(key=lambda job: job.num_sequences * job.context_len)
    prefill = EngineJob(f"prefill_{shape.prefill_len}", 1, shape.prefill_len, 0, for_peers=True)
    return [prefill, *decodes]


def measure_peers(
    session: GpuSession, shape: GpuShape, programs: Sequence[PeerProgram], figures: PeerFigures
) -> None:
    """Runs the peers one after the other, each in its own section."""
    for program in programs:
        work = partial(_measure, session, shape, program, figures)
        session.section(f"peer {program.name}", work, needs_s=JOB_NEEDS_S)


def _measure(
    session: GpuSession, shape: GpuShape, program: PeerProgram, figures: PeerFigures
) -> None:
    """Adds a peer's figures for the jobs for which there is time."""
    end_s = session.clock.now_s() + min(PEER_S, session.left_s)
    folder = Path(tempfile.mkdtemp(prefix="baton-peer-"))
    (folder / "config.json").write_bytes(msgspec.json.encode(config_of(shape.model)))
    speeds = figures.speeds.setdefault(program.name, {})
    try:
        with Driven(program.name, _command(program, shape, folder), environment_of_peers()) as peer:
            peer.start()
            facts = peer.ready(end_s - session.clock.now_s())
            figures.versions[program.name] = str(facts.get("version"))
            for job in jobs_of(shape):
                left_s = end_s - session.clock.now_s()
                if left_s < JOB_NEEDS_S:
                    session.skip(f"{program.name}: {job.name}", "no time")
                    continue
                speeds[job.name] = statistics.median(_speeds(peer, job, shape, left_s))
                session.say(f"   {program.name} {job.name}: {speeds[job.name]:,.1f} tokens/s")
    except DrivenFailed as error:
        session.skip(f"peer {error.name}", error.reason)
        for line in error.last_lines:
            session.say(f"      {line}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _speeds(peer: Driven, job: EngineJob, shape: GpuShape, timeout_s: float) -> Iterator[float]:
    """Returns the tokens per second of each run. The first run warms up and is left out. Raises
    DrivenFailed.
    """
    do, key = ("decode", "decode_s") if job.num_steps else ("generate", "prefill_s")
    for number in range(1 + NUM_RUNS):
        prompts = prompts_of(job, shape.model.vocab_size, seed=0, repeat=number)
        answer = peer.ask(do, timeout_s=timeout_s, prompts=prompts, num_steps=job.num_steps)
        seconds = answer.get(key)
        if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise DrivenFailed(peer.name, f"{job.name} took {seconds!r} seconds", ())
        if number:
            yield job.num_tokens / seconds


def _command(program: PeerProgram, shape: GpuShape, folder: Path) -> Sequence[str]:
    # Sequences decode until the last prompt is computed, so the first sequences need longer
    # answers.
    longer = [
        replace(job, num_steps=job.num_steps + job.num_sequences + 16) for job in jobs_of(shape)
    ]
    fixed = {"--checkpoint": folder, "--variant": VARIANT, "--threads": 1}
    words = [str(word) for pair in (fixed | limits_of(longer)).items() for word in pair]
    return [str(program.python), str(DRIVER), program.name, *words]
