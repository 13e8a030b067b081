"""The study: every policy, at every size, on every load.

| result                        | unit |                                                           |
|-------------------------------|------|-----------------------------------------------------------|
| LOAD/infinite                 | %    | hits of a cache that holds everything                     |
| LOAD/SIZE/leaf_lru, leaf_arc  | %    | hits, leaves first                                        |
| LOAD/SIZE/worth               | %    | hits of the policy that learns what blocks are worth      |
| LOAD/SIZE/ids, noisy, exact   | %    | the same with hints of all clients                        |
| LOAD/SIZE/half_ids, half_noisy| %    | the same with hints of half of the clients                |
| LOAD/SIZE/twice, idle         | %    | `worth` if only those blocks are stored                   |
| …/written                     | %    | blocks that were written for that                         |

SIZE is in blocks. All figures are shares of the blocks of all prompts. The limit is Belady's, which
knows the future; peers are classic policies, which treat blocks as keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.common.progress import Say
from bench.common.report import Result, result_of
from bench.eviction.classics import CLASSICS
from bench.eviction.play import PlayPlan, Says, Writes, belady_percent, play, play_classic
from bench.eviction.turns import ChatTurn, num_accesses
from kvtransfer.store.eviction.leaf_arc import LeafArc
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.eviction.seam import Eviction

OURS: dict[str, Callable[[int], Eviction]] = {
    "leaf_lru": lambda _: LeafLru(),
    "leaf_arc": LeafArc,
    "worth": LeafWorth,
}


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The loads by name, the sizes in blocks of each, and the seed of the clients' errors."""

    loads: Mapping[str, Sequence[ChatTurn]]
    sizes: Mapping[str, Sequence[int]]
    seed: int


def study(plan: StudyPlan, say: Say) -> list[Result]:
    """All results, in the order of the table above."""
    found = []
    for load, turns in plan.loads.items():
        endless = belady_percent(turns, num_accesses(turns))
        found.append(result_of(f"{load}/infinite", [endless], "%"))
        for size in plan.sizes[load]:
            say(f"{load}: {size} blocks")
            found += _at_size(f"{load}/{size}", turns, size, plan.seed)
    return found


def _at_size(name: str, turns: Sequence[ChatTurn], size: int, seed: int) -> list[Result]:
    limit = belady_percent(turns, size)
    peers = {peer: play_classic(make(size), turns) for peer, make in CLASSICS.items()}
    seconds = turns[-1].arrived_s - turns[0].arrived_s
    rate_per_s = num_accesses(turns) / max(seconds, 1.0) / 2

    def hits(which: str, value: float) -> Result:
        return result_of(f"{name}/{which}", [value], "%").limited(limit).beside(peers)

    found = []
    for which, make in OURS.items():
        played = play(make(size), turns, PlayPlan(size))
        found.append(hits(which, played.hit_percent))
    for which, plan in _variants(size, seed, rate_per_s).items():
        played = play(LeafWorth(size), turns, plan)
        found.append(hits(which, played.hit_percent))
        if plan.writes != Writes.ALL:
            written = [played.written_percent]
            found.append(result_of(f"{name}/{which}/written", written, "%"))
    return found


def _variants(size: int, seed: int, rate_per_s: float) -> dict[str, PlayPlan]:
    return {
        "ids": PlayPlan(size, says=Says.IDS, seed=seed),
        "noisy": PlayPlan(size, says=Says.NOISY, seed=seed),
        "exact": PlayPlan(size, says=Says.EXACT, seed=seed),
        "half_ids": PlayPlan(size, says=Says.IDS, share=0.5, seed=seed),
        "half_noisy": PlayPlan(size, says=Says.NOISY, share=0.5, seed=seed),
        "twice": PlayPlan(size, writes=Writes.TWICE),
        "idle": PlayPlan(size, writes=Writes.IDLE, writes_per_s=rate_per_s),
    }


def halfway_lines(results: Sequence[Result]) -> list[str]:
    """A line for each size at which noisy hints miss the middle of best classic and limit."""
    lines = []
    for result in results:
        if result.name.endswith("/noisy") and result.limit is not None:
            best = max(peer.value for peer in result.peers.values())
            goal = (best + result.limit) / 2
            if result.value < goal:
                lines.append(f"{result.name} is {result.value:.1f} %, below half way: {goal:.1f}")
        if result.name.endswith("/worth"):
            best = max(peer.value for peer in result.peers.values())
            if result.value < best:
                lines.append(f"{result.name} is {result.value:.2f} %, a classic {best:.2f}")
    return lines
