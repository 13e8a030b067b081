"""A simulated worker: the real core, with a price in place of the forward pass.

It takes turns as the worker host does: all events that have come, a report if one is due, a plan,
the step, its results. Between the plan and the results lies nothing but time.

A step's tokens are a function of seed and position alone, so what a request is answered does not
depend on who answers it.

*Stretches.* As long as only decoding goes on, no block fills up and no answer ends, one step is
like the next: the schedulers would plan the same rows again. Such steps are one stretch: the core
plans once, and is given all of a row's tokens as if a draft had been accepted. Each token still has
its own time. Whatever comes to the worker cuts the stretch after the step that is running then, and
`settle` hands over what a stretch has come to so far, so that nobody can tell the difference but by
the clock on the wall.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bench.simulator.clock import Future, Rank
from bench.simulator.hardware import Hardware, Pricing, StepPrice
from bench.simulator.transfers import Transfers
from decode.scheduler import DecodeScheduler
from engine.batch import BatchPlan, BatchResult, Row, RowResult
from engine.block_events import BlockEvent, BlockRemoved, BlockStored, stored
from engine.blocks import BlockPool, CacheNews, Evicted
from engine.events import (
    AbortPull,
    Effect,
    Emit,
    Event,
    FromGateway,
    GrowLease,
    HoldLease,
    OpenLease,
    RevokeLease,
    StartPull,
)
from engine.intake import ReadPrompt, read_prompt
from engine.messages import (
    PROTOCOL_VERSION,
    Decode,
    Generate,
    GivenBack,
    Incarnation,
    Role,
    SeqId,
    ToGateway,
    Tokens,
    TransferAddress,
    Welcome,
    WorkerId,
)
from engine.offers import PrefixOffers
from engine.worker import Scheduler, WorkerCore
from prefill.scheduler import PrefillScheduler

REPORT_EVERY_S = 1.0
_SEED_STRIDE, _SEEDS = 7919, 2**30  # keep the tokens of different seeds apart


@dataclass(frozen=True, slots=True)
class Frame:
    """What a worker tells its gateway at once.

    Where messages bring tokens of several steps, `ends_s` are the ends of those steps.
    """

    messages: Sequence[ToGateway]
    ends_s: Sequence[float]
    blocks: Sequence[BlockEvent] = ()


class Listener(Protocol):
    """Who is told what a worker does."""

    def hear(self, worker_id: WorkerId, frame: Frame) -> None:
        """A worker sends a frame now."""
        ...


@dataclass(slots=True)
class _Stretch:
    """Steps of equal rows, the last of which ends at `ends_s[-1]`."""

    rows: Sequence[Row]
    ends_s: list[float]
    began_s: float
    steady: bool  # whether it may be cut between steps
    planned_end_s: float = 0.0


class SimWorker:
    """One worker of the cluster, from its core outwards."""

    def __init__(  # noqa: PLR0913 - the parts of a worker
        self,
        worker_id: WorkerId,
        role: Role,
        *,
        hardware: Hardware,
        future: Future,
        transfers: Transfers,
        listener: Listener,
        read: ReadPrompt = read_prompt,
        leaps: bool = True,
    ) -> None:
        """`read` as in `engine.intake.Intake`. Without `leaps` each step is one of its own."""
        self.worker_id = worker_id
        self.role = role
        self.busy_s = 0.0
        self.num_steps = 0
        self._hardware = hardware
        self._pricing = Pricing(hardware)
        self._future = future
        self._transfers = transfers
        self._listener = listener
        self._leaps = leaps
        self._decode: DecodeScheduler | None = None
        self._block_size = hardware.layout.block_size
        self.pool = BlockPool(hardware.num_blocks, keeps_news=True)
        self.core = self._open_core(read)
        self._inbox: list[Event] = []
        self._max_len: dict[SeqId, int] = {}  # of sequences that decode here
        self._stretch: _Stretch | None = None
        self._next_report_s = 0.0
        self._report_planned = False
        self.reports = True

    def _open_core(self, read: ReadPrompt) -> WorkerCore:
        hardware, pool, block_size = self._hardware, self.pool, self._block_size
        address = TransferAddress(self.worker_id, Incarnation("1"), "")
        schedulers: list[Scheduler] = []
        if self.role.decodes:
            self._decode = DecodeScheduler(
                pool, block_size=block_size, max_running=hardware.max_running, read=read
            )
            schedulers.append(self._decode)
        if self.role.prefills:
            schedulers.append(
                PrefillScheduler(
                    pool,
                    block_size=block_size,
                    chunk_tokens=hardware.chunk_tokens,
                    address=address,
                    read=read,
                )
            )
        schedulers.append(PrefixOffers(pool, block_size=block_size, address=address, read=read))
        return WorkerCore(schedulers, pool, hardware.max_batch_tokens)

    def welcome(self) -> Welcome:
        """Who it is and what it can hold."""
        return Welcome(
            version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=Incarnation("1"),
            role=self.role,
            fingerprint=self._hardware.name,
            layout=self._hardware.layout,
            num_blocks=self._hardware.num_blocks,
            max_running=self._hardware.max_running,
        )

    # ------------------------------------------------------------ what comes in

    def receive(self, events: list[Event]) -> None:
        """Events that are taken in when the step that is running ends."""
        self._inbox += events
        if self._stretch is None:
            self._turn()
        else:
            self._cut(self._stretch)

    def settle(self, until_s: float) -> Frame | None:
        """What a stretch has come to up to that time, if the gateway has not heard of it."""
        stretch = self._stretch
        if stretch is None or not stretch.steady:
            return None
        num_over = bisect_right(stretch.ends_s, until_s)
        if num_over == 0 or num_over == len(stretch.ends_s):
            return None
        ends_s = stretch.ends_s[:num_over]
        frame = self._frame(self._finish(stretch, ends_s), ends_s)
        plan, effects = self.core.plan(ends_s[-1])
        assert plan is not None
        assert not effects
        stretch.rows, stretch.began_s = plan.rows, ends_s[-1]
        del stretch.ends_s[:num_over]
        return frame

    # ------------------------------------------------------------ turns

    def _turn(self) -> None:
        now_s = self._future.now_s
        while self._inbox:
            events, self._inbox = self._inbox, []
            self._note_lengths(events)
            effects = [e for event in events for e in self.core.handle(event, now_s)]
            self._perform(effects, (now_s,))
        if self.reports and now_s >= self._next_report_s:
            self._report()
        plan, effects = self.core.plan(now_s)
        self._perform(effects, (now_s,))
        if plan is not None:
            self._begin(plan)
        elif self.reports and not self._report_planned:
            self._report_planned = True
            self._future.plan(self._next_report_s, Rank.ROUTINE, self._on_report_due, None)

    def _note_lengths(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, FromGateway) and isinstance(event.message, Decode | Generate):
                self._max_len[event.message.seq_id] = event.message.limits.max_len

    def _on_report_due(self, _: None) -> None:
        self._report_planned = False
        if self._stretch is None and self.reports:
            self._turn()

    def _report(self) -> None:
        self._next_report_s = self._future.now_s + REPORT_EVERY_S
        load = self.core.load(self._transfers.num_leases_of(self.worker_id), {})
        self._listener.hear(self.worker_id, Frame([load], (self._future.now_s,)))

    # ------------------------------------------------------------ steps

    def _begin(self, plan: BatchPlan) -> None:
        num_decoding = 0 if self._decode is None else self._decode.num_running
        price = price_of(plan.rows, min(num_decoding, len(plan.rows)))
        now_s = self._future.now_s
        if price.num_new or not self._leaps:
            ends_s = [now_s + self._pricing.step_s(price)]
        else:
            ends_s = self._ends_s(plan.rows, price)
        self._stretch = _Stretch(plan.rows, ends_s, now_s, steady=not price.num_new)
        self._plan_end(self._stretch)

    def _ends_s(self, rows: Sequence[Row], price: StepPrice) -> list[float]:
        """The ends of the steps for which these rows stay as they are and nothing else is due."""
        num_steps = min(map(self._num_alike, rows))
        at_s, num_context = self._future.now_s, price.num_context
        ends_s: list[float] = []
        for _ in range(num_steps):
            at_s += self._pricing.decode_s(price.num_rows, num_context)
            num_context += price.num_rows
            ends_s.append(at_s)
            if at_s >= self._next_report_s:
                break
        return ends_s

    def _num_alike(self, row: Row) -> int:
        """Steps until an answer ends or a block is full. The last of them may do either."""
        until_full = len(row.block_table) * self._block_size - row.end + 1
        return min(self._max_len[row.seq_id] - row.end, until_full)

    def _plan_end(self, stretch: _Stretch) -> None:
        stretch.planned_end_s = stretch.ends_s[-1]
        self._future.plan(
            stretch.planned_end_s,
            Rank.STEP_END,
            partial(self._on_end, stretch),
            stretch.planned_end_s,
        )

    def _cut(self, stretch: _Stretch) -> None:
        """Ends the stretch with the step that is running."""
        num_steps = bisect_left(stretch.ends_s, self._future.now_s) + 1
        if num_steps < len(stretch.ends_s):
            del stretch.ends_s[num_steps:]
            self._plan_end(stretch)

    def _on_end(self, stretch: _Stretch, end_s: float) -> None:
        if self._stretch is not stretch or stretch.planned_end_s != end_s:
            return  # it was cut
        self._stretch = None
        self._perform(self._finish(stretch, stretch.ends_s), stretch.ends_s)
        self._turn()

    def _finish(self, stretch: _Stretch, ends_s: Sequence[float]) -> list[Effect]:
        """So many of its steps have been run."""
        self.num_steps += len(ends_s)
        self.busy_s += ends_s[-1] - stretch.began_s
        result = BatchResult([result_of(row, len(ends_s)) for row in stretch.rows])
        return self.core.finish(result, ends_s[-1])

    # ------------------------------------------------------------ what goes out

    def _perform(self, effects: Sequence[Effect], ends_s: Sequence[float]) -> None:
        for effect in effects:
            match effect:
                case OpenLease(lease_id):
                    self._transfers.open(self, lease_id)
                case GrowLease(lease_id, block_ids):
                    self._transfers.grow(lease_id, len(block_ids))
                case RevokeLease(lease_id):
                    self._transfers.revoke(lease_id)
                case HoldLease(seq_id, lease):
                    self._transfers.hold(self, seq_id, lease)
                case StartPull(seq_id, blocks):
                    self._transfers.start(self, seq_id, tuple(index for index, _ in blocks))
                case AbortPull(seq_id):
                    self._transfers.abort(self, seq_id)
        frame = self._frame(effects, ends_s)
        if frame is not None:
            self._listener.hear(self.worker_id, frame)

    def _frame(self, effects: Sequence[Effect], ends_s: Sequence[float]) -> Frame | None:
        messages = [effect.message for effect in effects if isinstance(effect, Emit)]
        for message in messages:
            if isinstance(message, GivenBack) or (isinstance(message, Tokens) and message.finish):
                self._max_len.pop(message.seq_id, None)
        news = self.pool.take_news()
        if not messages and not news:
            return None
        return Frame(messages, ends_s, block_events(news, self._block_size))


def price_of(rows: Sequence[Row], num_decoding: int) -> StepPrice:
    """What a step of these rows, the first of which decode, adds up to."""
    chunks = rows[num_decoding:]
    return StepPrice(
        num_new=sum(len(row.token_ids) for row in chunks),
        squares=sum(row.end * row.end - row.start * row.start for row in chunks),
        num_rows=num_decoding,
        num_context=sum(row.end for row in rows[:num_decoding]),
    )


def result_of(row: Row, num_tokens: int) -> RowResult:
    """The tokens that follow a row, where it chooses any: a function of seed and position."""
    if row.sampling is None:
        return RowResult()
    first = row.sampling.seed * _SEED_STRIDE % _SEEDS + row.end
    return RowResult(tuple(range(first, first + num_tokens)))


def block_events(news: Sequence[CacheNews], block_size: int) -> list[BlockEvent]:
    """What a worker would publish of these changes."""
    events: list[BlockEvent] = []
    for item in news:
        last = events[-1] if events else None
        if isinstance(item, Evicted):
            if isinstance(last, BlockRemoved):
                last.block_hashes.append(item.block_hash)
            else:
                events.append(BlockRemoved([item.block_hash], medium=None))
        elif isinstance(last, BlockStored) and last.block_hashes[-1] == item.parent:
            last.block_hashes.append(item.block_hash)
        else:
            events.append(stored([item.block_hash], item.parent, block_size=block_size))
    return events
