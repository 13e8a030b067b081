"""Measures vLLM on the prompts of `measure_restarts`: computed, and loaded from files by a new
process.

vLLM computes in fp32, because it runs these checkpoints on a CPU in no other format. It has one
thread, like our worker. Its files are on the measured disk, but stay in the system's page cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.command import Say, say_nothing
from bench.common.options import PeerProgram, environment_of_peers
from bench.common.prompts import plain_token_ids
from bench.common.shapes import cached_checkpoint
from bench.lab.store.parts import PrefixElsewhere
from bench.lab.store.plan import StorePlan, store_prompts
from bench.processes.driven import Driven

SCRIPT = Path(__file__).parent / "vllm_files.py"
START_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 120.0
# least share of a prompt that must be cached: vLLM's blocks are larger than ours
LEAST_CACHED = 0.9


@dataclass(frozen=True, slots=True)
class PeerRestart:
    """Seconds of the same prompts in vLLM: computed, and loaded from files by a new process."""

    cold_s: tuple[float, ...]
    files_s: tuple[float, ...]
    version: str


def measure(
    plan: StorePlan, peer: PeerProgram, folder: Path, say: Say = say_nothing
) -> PeerRestart:
    """Measures vLLM, with its files in `folder`. Raises DrivenFailed, PrefixElsewhere."""
    checkpoint = cached_checkpoint(plan.shape, plan.seed)
    vocab = plain_token_ids(checkpoint)
    prompts = store_prompts(plan, vocab, plan.prompts, name="prompts")
    warm_ups = store_prompts(plan, vocab, 2, name="warm-up")
    found: list[tuple[float, ...]] = []
    for is_again, warm_up in enumerate(warm_ups):
        say(f"{peer.name}: {'prompts from files' if is_again else 'prompts computed'}")
        command = [str(peer.python), str(SCRIPT), str(checkpoint), str(folder)]
        engine = Driven(peer.name, command, _environment(peer))
        engine.start()
        try:
            version = str(engine.ready(START_TIMEOUT_S)["version"])
            least = LEAST_CACHED * plan.prompt_len if is_again else 0.0
            _ask_all(engine, [warm_up], 0.0)
            found.append(_ask_all(engine, prompts, least))
        finally:
            engine.close()
    return PeerRestart(found[0], found[1], version)


def _ask_all(
    engine: Driven, prompts: Sequence[list[int]], least_cached: float
) -> tuple[float, ...]:
    seconds = []
    for prompt in prompts:
        answer = engine.ask("ask", timeout_s=ASK_TIMEOUT_S, prompt=prompt)
        if answer["num_cached"] < least_cached or (not least_cached and answer["num_cached"]):
            raise PrefixElsewhere(f"{engine.name} had {answer['num_cached']} tokens cached")
        seconds.append(float(answer["seconds"]))
    return tuple(seconds)


def _environment(peer: PeerProgram) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    environment = environment_of_peers() | threads
    openmp = peer.python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():  # vLLM's documentation recommends to preload OpenMP
        environment["LD_PRELOAD"] = str(openmp)
    return environment
