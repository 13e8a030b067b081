"""Two prefill workers, a decode worker and a mixed worker, under every order of steps and messages.

The decode worker may compute prompts itself; otherwise it gives them back. Clients connect and
leave, gateways die, threads pause, time passes. The pools are so small that sequences wait, are
given back, and evict blocks. Each client always receives exactly the tokens of the reference. In
the end every block is free and every lease has ended.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import pytest

from decode.arrivals import Arrivals
from decode.drafts import DraftPlanner
from decode.scheduler import DecodeScheduler
from engine.config import Speculate
from engine.messages import Grammar, GrammarKind, Limits, Role, Sampling, WorkerId
from engine.worker.blocks import IN_FLIGHT, LEASED, BlockPool
from engine.worker.events import GrowLease, PullDone
from engine.worker.sequence import Sequence as EngineSequence
from prefill.prompts import WaitingPrompts
from prefill.scheduler import PrefillScheduler
from tests.kits.fakes.cluster import FakeCluster
from tests.kits.fakes.gateway import Ask, FakeGateway
from tests.kits.fakes.model import VOCAB_SIZE, FakeRunner
from tests.kits.fakes.worker import PARTS, WILFUL, WorkerShape
from tests.kits.seeds import seeds

NUM_GATEWAYS = 2
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
PATHS = [("p", "d"), ("p", "m"), ("m", "m"), ("d", "d")]
OFFERED = [
    ("q", "d", "p"),
    ("q", "m", "d"),
    ("p", "d", "m"),
    ("m", "m", "p"),
    ("q", "d", "d"),
    ("d", "d", "q"),
]
ROUTES = [*[(route, *PATHS) for route in (*PATHS, *OFFERED)], tuple(OFFERED)]
STEMS = [tuple((7 * i * i + k) % VOCAB_SIZE for i in range(16)) for k in (1, 4)]
SAMPLINGS = (
    Sampling(),
    Sampling(seed=1),
    Sampling(seed=2, repetition_penalty=1.5, logprobs=2),
    Sampling(seed=3, grammar=Grammar(GrammarKind.REGEX, "3")),
    Sampling(seed=4, grammar=Grammar(GrammarKind.REGEX, "4"), presence_penalty=1.0),
)
NUM_TOPS = (*6 * [None], 0, 2)
STEM_LENS = (0, 3, 4, 8, 11, 16)
MAX_STEM_LEN = max(STEM_LENS)
STOPS = ((), (3,), (1, 5))
MAX_SUFFIX_LEN = 5
MAX_ANSWER_LEN = 10  # together with a stem and a suffix, such an answer fits into the smallest pool
SECONDS = (0.3, 1.0, 4.0, 7.0)
NUM_EVENTS = 300  # number of events in a run
SEARCHED_RUNS = seeds(200)  # more seeds, searched for rare events until each event has occurred
PREFIX_EVENTS = (
    "prefix_offers:held",
    "prefix_offers:not_held",
    "pulled_prefix_blocks",
    "fallbacks:prefix_without_memory",
    "fallbacks:prefix_pull_failed",
    "kept_blocks",
    "handed_over",
    "pending_rows",
    "void_rows",
    "held_steps",
    "held_steps:late",
)
SIZES = {
    "stretch": (4.0, 1.5, None),
    "num_blocks": (8, 9, 12, 32),
    "max_batch_tokens": (5, 8, 12),
    "chunk_tokens": (2, 4, 5, 9),
    "max_running": (1, 2, 4),
    "growth_tokens": (0, 4, 12),
    "copies_at_once": (True, False),
    "window_blocks": (1, 2, 64),
    "overlaps": (False, True),
    "speculate": (WILFUL, *Speculate),
}
SPECULATION_EVENTS = (
    "drafted:ngram",
    "accepted:ngram",
    "drafted:draft",
    "accepted:draft",
    "accepted_len:0",
    "accepted_len:2",
    "spec_steps",
    "preempted",
)


class Traffic:
    """A cluster, and all actions of clients, gateways and operators on it."""

    def __init__(self, prefill: WorkerShape, decode: WorkerShape, mixed: WorkerShape) -> None:
        shapes = {"p": prefill, "q": prefill, "d": decode, "m": mixed}
        self.cluster = FakeCluster(shapes)
        self._num_gateways = 0
        self.gateways = [self._new_gateway() for _ in range(NUM_GATEWAYS)]

    def ask(
        self,
        prompt: Sequence[int],
        *,
        gateway: int,
        answer_lens: tuple[int, int],
        stops: tuple[int, ...],
        routes: Sequence[tuple[str, ...]],
        sampling: Sampling,
        num_top: int | None,
    ) -> None:
        shortest, longest = answer_lens
        length = len(prompt)
        limits = Limits(length + longest, length + shortest, stops, prompt_len=length)
        self.cluster.submit(
            self.gateways[gateway],
            prompt,
            limits=limits,
            routes=routes,
            sampling=sampling,
            num_top=num_top,
        )

    def conversation(self, which: int) -> tuple[int, ...]:
        """Returns the beginning of an earlier prompt with its answer, to be continued."""
        asks = self.cluster.asks
        if not asks:
            return ()
        ask = asks[which % len(asks)]
        return (ask.prompt + ask.expected.token_ids)[:MAX_STEM_LEN]

    def cancel(self, which: int) -> None:
        for gateway, ask in self._live(which):
            gateway.cancel(ask)

    def cancel_pulling(self) -> None:
        """Cancels the requests whose prefix is being pulled. Random choices seldom hit such a
        request.
        """
        for gateway in self.gateways:
            for ask in list(gateway.asks.values()):
                if ask.seq_id in self.cluster.workers[ask.route.prefill].prefill.waiting.pulling:
                    gateway.cancel(ask)

    def retry(self, which: int) -> None:
        for gateway, ask in self._live(which):
            gateway.retry(ask)

    def change_role(self, which: int, worker: str, role: Role) -> None:
        self.gateways[which].set_role(WorkerId(worker), role)

    def hand_over(self, which: int, target: str) -> None:
        """Hands over a running request, even if its gateway has not received all its tokens."""
        for gateway, ask in self._live(which):
            gateway.hand_over(ask, WorkerId(target))

    def hand_over_all(self, target: str) -> None:
        for gateway in self.gateways:
            for ask in list(gateway.asks.values()):
                gateway.hand_over(ask, WorkerId(target))

    def stop_waiting(self, which: int) -> None:
        for gateway, ask in self._live(which):
            gateway.stop_waiting(ask)

    def lose_gateway(self, which: int, num_arriving: int) -> None:
        """Replaces a gateway. Its clients do not reconnect."""
        self.cluster.lose(self.gateways[which], num_arriving)
        self.gateways[which] = self._new_gateway()

    def wait(self, seconds: float) -> None:
        self.cluster.now_s += seconds

    def block(self, worker: str, part: str) -> None:
        self.cluster.workers[WorkerId(worker)].stuck.add(part)

    def block_link(self, which: int, worker: str) -> None:
        self.gateways[which].links[WorkerId(worker)].is_stuck = True

    def go_on(self, num_moves: int, rng: random.Random) -> None:
        for _ in range(num_moves):
            self.cluster.move(rng)

    def finish(self, rng: random.Random) -> None:
        for worker in self.cluster.workers.values():
            self.gateways[0].set_role(worker.worker_id, worker.shape.role)
        self.cluster.drain(rng)
        for ask in self.cluster.asks:
            assert ask.outcome in ("finished", "cancelled", "lost")
            if ask.outcome == "finished":
                assert tuple(ask.tokens) == ask.expected.token_ids
        for worker in self.cluster.workers.values():
            counts = worker.pool.counts()
            assert counts.free + counts.cached == worker.shape.num_blocks
            assert worker.endpoint.source.num_leases == 0
            assert not worker.prefill.leases.opened
            assert not worker.offers.leases.opened
            assert worker.endpoint.sink.num_pulls == 0

    def _live(self, which: int) -> list[tuple[FakeGateway, Ask]]:
        """Returns a request that has not ended, or None."""
        live = [(gateway, ask) for gateway in self.gateways for ask in gateway.asks.values()]
        return [live[which % len(live)]] if live else []

    def _new_gateway(self) -> FakeGateway:
        self._num_gateways += 1
        return self.cluster.add_gateway(f"g{self._num_gateways}")


def random_shapes(rng: random.Random) -> list[WorkerShape]:
    """Returns random shapes. Half of the clusters draft nothing: with drafts, no step is planned
    ahead.
    """
    drafts = rng.random() < 0.5
    has_draft_model = drafts and rng.random() < 0.7
    shapes = []
    for role in ROLES:
        sizes = {name: rng.choice(c) for name, c in SIZES.items()}
        if not drafts:
            sizes["speculate"] = Speculate.OFF
        shapes.append(WorkerShape(role, has_draft_model=has_draft_model, **sizes))
    return shapes


def random_prompt(traffic: Traffic, rng: random.Random) -> tuple[int, ...]:
    fresh = rng.choice(STEMS)[: rng.choice(STEM_LENS)]
    stem = rng.choice([fresh, traffic.conversation(rng.randrange(100))])
    return stem + tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, MAX_SUFFIX_LEN)))


def random_traffic(seed: int) -> Counter[str]:
    """Runs a cluster under random traffic and faults. Returns the schedulers' counters."""
    rng = random.Random(seed)
    traffic = Traffic(*random_shapes(rng))

    def ask() -> None:
        longest = rng.randint(1, MAX_ANSWER_LEN)
        traffic.ask(
            random_prompt(traffic, rng),
            gateway=rng.randrange(NUM_GATEWAYS),
            answer_lens=(rng.randrange(longest), longest),
            stops=rng.choice(STOPS),
            routes=rng.choice(ROUTES),
            sampling=rng.choice(SAMPLINGS),
            num_top=rng.choice(NUM_TOPS),
        )

    events: dict[Callable[[], None], float] = {
        lambda: traffic.go_on(rng.randint(1, 24), rng): 1.0,
        ask: 0.3,
        lambda: traffic.cancel(rng.randrange(100)): 0.1,
        traffic.cancel_pulling: 0.15,
        lambda: traffic.retry(rng.randrange(100)): 0.01,
        lambda: traffic.stop_waiting(rng.randrange(100)): 0.02,
        lambda: traffic.hand_over(rng.randrange(100), rng.choice("dm")): 0.05,
        lambda: traffic.hand_over_all(rng.choice("dm")): 0.1,
        lambda: traffic.change_role(
            rng.randrange(NUM_GATEWAYS), rng.choice("pqdm"), rng.choice(list(Role))
        ): 0.02,
        lambda: traffic.lose_gateway(rng.randrange(NUM_GATEWAYS), rng.randrange(4)): 0.01,
        lambda: traffic.wait(rng.choice(SECONDS)): 0.03,
        lambda: traffic.block(rng.choice("pqdm"), rng.choice(PARTS)): 0.15,
        lambda: traffic.block_link(rng.randrange(NUM_GATEWAYS), rng.choice("pqdm")): 0.1,
        traffic.cluster.unblock: 0.08,
    }
    for event in rng.choices(list(events), list(events.values()), k=NUM_EVENTS):
        event()
    traffic.finish(rng)
    counted: Counter[str] = Counter()
    for worker in traffic.cluster.workers.values():
        counted.update(worker.core.load(0, {}).counters)
    return counted


counted_in = cache(random_traffic)  # two tests use the same runs
LONG_RUNS = seeds(24)
RARE_RUN = 22  # the seed of a run with an event that no long run reaches


@pytest.mark.parametrize("seed", LONG_RUNS)
def test_every_request_of_a_long_run_is_answered_correctly(seed):
    counted_in(seed)


def test_long_runs_reach_every_counted_event():
    missing = {*PREFIX_EVENTS, *SPECULATION_EVENTS}
    for seed in (*LONG_RUNS, RARE_RUN, *SEARCHED_RUNS):
        missing -= (+counted_in(seed)).keys()
        if not missing:
            return
    raise AssertionError(f"no run came to {missing}")


# ---------------------------------------------------------------- planted mistakes


def _keep_what_has_not_arrived(self, arrived, pool):
    """Counts the block after the last arrived block as arrived too."""
    _keep(self, range(max(arrived, default=-2) + 2), pool)


def _remove_the_aborted_prefix(self, seq_id):
    """Releases the blocks of a cancelled prompt while its pull still writes to them."""
    effects = _cancel_prompt(self, seq_id)
    if (prompt := self.pulling.get(seq_id)) is not None and prompt.is_cancelled:
        del self.pulling[seq_id]
        self._pool.release(IN_FLIGHT, prompt.pulled)
        prompt.seq.release(self._pool)
    return effects


def _count_all_as_pulled(self, ended):
    """Treats a failed prefix pull as done."""
    return _end_pull(self, PullDone(ended.seq_id, "shm"))


def _lease_no_idle_block(self, kind, blocks):
    """Leases only blocks that have an owner, not idle ones."""
    if kind == LEASED:
        blocks = [block for block in blocks if not self._is_idle(block)]
    _hold(self, kind, blocks)


def _keep_leased(self, kind, blocks, mark=None):
    """Never releases the blocks of a finished lease."""
    if kind != LEASED:
        _release(self, kind, blocks, mark)


def _grow_too_early(self, rows, results):
    """Counts a block as ready when only its first token is computed."""
    effects = _advance_prompts(self, rows, results)
    for prompt in self.computing.values():
        seq, first = prompt.seq, prompt.num_leased_ready
        computed = -(-seq.num_computed_tokens // self._block_size)
        if prompt.lease_id is not None and computed > first:
            prompt.num_leased_ready = computed
            effects.append(GrowLease(prompt.lease_id, tuple(seq.block_table[first:computed])))
    return effects


def _remove_the_aborted(self, seq_id):
    """Removes a cancelled pull before the pull has ended."""
    effects = _cancel(self, seq_id)
    if (arriving := self.aborting.pop(seq_id, None)) is not None:
        self._pool.release(IN_FLIGHT, arriving.pulled)
        arriving.seq.release(self._pool)
    return effects


def _see_all_that_was_accepted(self, row, result, seq):
    """Assumes that the draft model has computed the last token that it proposed."""
    if not self.has_draft_model or not row.draft_token_ids:
        return _num_seen(self, row, result, seq)
    return min(row.end + result.num_accepted, len(seq.token_ids))


def _see_what_was_left_out(self, row, result, seq):
    """Assumes that the draft model computes every row, including skipped ones."""
    return None


def _free_at_once(self, kind, blocks, mark=None):
    """Frees blocks at once, although a step in flight may still write to them."""
    _release(self, kind, blocks, mark)
    for freed in self._freed_in_flight:
        self._evict_first.update(dict.fromkeys(freed))
        freed.clear()


def _write_late(self, writes):
    """Writes the results of a step only when the next step ends, as a GPU may do without a wait."""
    _write(self, self.__dict__.pop("late", {}))
    self.late = writes


def _draft_as_if_nothing_was_banned(self):
    return max(self.limits.max_len - len(self.token_ids) - 1, 0)


def _take_all_that_was_accepted(self, seq, row, result):
    """Also accepts the tokens behind a stop."""
    tokens = _extend(self, seq, row, result)
    tokens.token_ids[:] = result.token_ids
    return tokens


def _extend_without_history(self, tokens):
    history, self.history = self.history, None
    extended = _extend_seq(self, tokens)
    self.history = history
    return extended


def _extend_without_guide(self, tokens):
    guide, self.guide = self.guide, None
    extended = _extend_seq(self, tokens)
    self.guide = guide
    return extended


_extend_seq = EngineSequence.extend
_hold, _release = BlockPool.hold, BlockPool.release
_write = FakeRunner.write
_num_seen = DraftPlanner.num_seen
_extend = DecodeScheduler._extend
_keep = EngineSequence.keep_pulled
_cancel_prompt = WaitingPrompts.cancel
_end_pull = WaitingPrompts.end_pull
_advance_prompts = PrefillScheduler.advance
_cancel = Arrivals.cancel

MISTAKES = {
    "an evicted block is still found": (BlockPool, "_remove", lambda self, block: None),
    "a stop is not banned": (EngineSequence, "banned", lambda self, num_pending=0: ()),
    "a block is free while a step may write to it": (BlockPool, "release", _free_at_once),
    "a step's writes are not waited for": (FakeRunner, "write", _write_late),
    "a half computed block is leased": (PrefillScheduler, "advance", _grow_too_early),
    "an aborted pull holds nothing": (Arrivals, "cancel", _remove_the_aborted),
    "a cancelled prefix pull holds nothing": (WaitingPrompts, "cancel", _remove_the_aborted_prefix),
    "a failed prefix pull is taken for done": (WaitingPrompts, "end_pull", _count_all_as_pulled),
    "what has not arrived is kept": (EngineSequence, "keep_pulled", _keep_what_has_not_arrived),
    "an offered prefix is not leased": (BlockPool, "hold", _lease_no_idle_block),
    "a finished lease keeps its blocks": (BlockPool, "release", _keep_leased),
    "the draft model has seen its last proposal": (
        DraftPlanner,
        "num_seen",
        _see_all_that_was_accepted,
    ),
    "the draft model has seen what it left out": (DraftPlanner, "num_seen", _see_what_was_left_out),
    "a draft goes on when a stop is banned no longer": (
        EngineSequence,
        "max_drafted",
        _draft_as_if_nothing_was_banned,
    ),
    "tokens behind a stop are taken": (DecodeScheduler, "_extend", _take_all_that_was_accepted),
    "blocks of rejected tokens are kept": (EngineSequence, "trim", lambda self, pool: None),
    "penalties do not see the answer": (EngineSequence, "extend", _extend_without_history),
    "a grammar does not see the answer": (EngineSequence, "extend", _extend_without_guide),
}

# By planted mistake: the seed of a run that detects it, which is tried first. The first seed
# detects most of the other mistakes.
NOTICED_BY = {
    "a block is free while a step may write to it": 11,
    "a half computed block is leased": 1,
    "an aborted pull holds nothing": 1,
    "a cancelled prefix pull holds nothing": 4,
    "the draft model has seen its last proposal": 3,
    "the draft model has seen what it left out": 3,
    "a draft goes on when a stop is banned no longer": 4,
    "tokens behind a stop are taken": 9,
    "blocks of rejected tokens are kept": 3,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_deliberate_mistakes_are_noticed(mistake, monkeypatch):
    owner, name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        run_all((NOTICED_BY.get(mistake, 0), *SEARCHED_RUNS))


def run_all(runs: Iterable[int]) -> None:
    for seed in runs:
        random_traffic(seed)
