"""Simulates a worker: the real core, with a price in place of the forward pass.

A worker runs the same cycle as the worker host: it handles all events that arrived, sends a report
if one is due, plans a step, runs it, and processes its results. Between plan and results, only the
clock advances.

*Stretches.* While the worker only decodes, no block fills up and no answer ends, each step is like
the next: the schedulers would plan the same rows again. Such steps form one stretch, which the core
plans once. At the end of the stretch, the core gets all tokens of each row, in the form of an
accepted draft. Each token still has its own time. An event for the worker ends the stretch after
the running step.

*Reports.* A sequence's first tokens and its end are sent to the gateway at once. Other tokens may
wait for the next report, in one message. Before the router machine makes a decision, `settle`
returns the tokens that a live worker would have sent by then. So the results are equal to those of
single steps, if the router has the workers' costs as a setting. If the router measures the costs,
it gets one sample for a whole stretch.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import msgspec
import numpy as np

from bench.simulator.crowd import Crowd
from bench.simulator.hardware import HardwareProfile, Pricing, StepPrice
from bench.simulator.prompts import base_of
from bench.simulator.transfers import Future, Rank, Transfers
from deploy.worker.core import WorkerCore
from engine.demand import DecodeCost
from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    Generate,
    GivenBack,
    HandedOver,
    Incarnation,
    PrefillDone,
    Role,
    SeqId,
    ToGateway,
    Tokens,
    TransferAddress,
    Welcome,
    WorkerId,
)
from engine.worker.batch import BatchPlan, BatchResult, Row, RowResult, StepTimes
from engine.worker.block_events import BlockEvent, events_of
from engine.worker.blocks import BlockPool
from engine.worker.events import (
    Effect,
    Emit,
    EmitToAll,
    Event,
    FromGateway,
)
from engine.worker.intake import Intake, ReadPrompt, read_prompt

REPORT_EVERY_S = 1.0
NOTHING = RowResult()
# Tokens of an answer as a range, which has the methods of a tuple or list.
_tuple_of = cast("Callable[[int, int], tuple[int, ...]]", range)
_list_of = cast("Callable[[int, int], list[int]]", range)


# a struct for speed, because one is created for each sequence and report
class Said(msgspec.Struct, frozen=True):
    """A message, and the times at which its tokens were sampled."""

    message: ToGateway
    times_s: Sequence[float] = ()


class Frame(msgspec.Struct, frozen=True):
    """Messages and block events that a worker sends together."""

    said: Sequence[Said]
    blocks: Sequence[BlockEvent] = ()


class FrameListener(Protocol):
    """Receives the frames that workers send."""

    def on_frame(self, worker_id: WorkerId, frame: Frame) -> None:
        """Handles a frame that a worker sends at this moment."""
        ...


class _Stretch(msgspec.Struct):
    """Equal steps, the last of which ends at `ends_s[-1]`. The first rows of a step decode."""

    rows: Sequence[Row]
    num_decoding: int
    ends_s: "array[float]"
    began_s: float
    planned_end_s: float = 0.0


@dataclass(slots=True)
class _Told:
    """What was reported to the gateway about a decoding sequence. A decoding sequence has a token
    in every step.
    """

    max_len: int
    token: int  # the next token to report
    step: int = 0  # step of the next token, as an index in all decode steps of this worker
    has_begun: bool = False  # True: the first tokens were reported


class SimWorker:
    """One worker of the cluster: its core, its block pool, and the frames that it sends."""

    def __init__(  # noqa: PLR0913 - the parts of a worker
        self,
        worker_id: WorkerId,
        role: Role,
        *,
        hardware: HardwareProfile,
        future: Future,
        transfers: Transfers,
        listener: FrameListener,
        read: ReadPrompt = read_prompt,
        leaps: bool = True,
        crowd: Crowd | None = None,
        stretch: float | None = None,
    ) -> None:
        """`read` goes to `engine.worker.intake.Intake`, `stretch` to `Welcome`. If `leaps` is off,
        each step is simulated separately.
        """
        self.worker_id = worker_id
        self.role = role
        self.busy_s = 0.0
        self.num_steps = 0
        self._hardware = hardware
        self._pricing = Pricing(hardware)
        self._crowd = crowd or Crowd(hardware, future)
        self._future = future
        self._transfers = transfers
        self._listener = listener
        self._leaps = leaps
        self._block_size = hardware.layout.block_size
        self.pool = BlockPool(hardware.num_blocks, keeps_events=True, with_tokens=False)
        self._stretch_limit = stretch
        self.core = WorkerCore(
            self.pool,
            hardware,
            intake=Intake(self._block_size, read=read),
            address=TransferAddress(worker_id, Incarnation("1"), ""),
            role=role,
            stretch=stretch,
        )
        self._decode = self.core.decode
        self._inbox: list[Event] = []
        self._expected: dict[SeqId, _Told] = {}  # sequences that will decode here
        self._told: dict[SeqId, _Told] = {}  # sequences that decode here
        self._ends_s = array("d")  # end times of the latest decode steps
        self._num_earlier = 0  # number of decode steps before those in `_ends_s`
        self._stretch: _Stretch | None = None
        self._said: list[Said] = []  # messages of the current cycle
        self._next_report_s = 0.0
        self._report_planned = False
        self._has_news = True  # True: something has changed since the last report
        self.reports = True

    def welcome(self) -> Welcome:
        """Returns the worker's first message to the gateway."""
        return Welcome(
            version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=Incarnation("1"),
            role=self.role,
            stretch=self._stretch_limit,
            fingerprint=self._hardware.name,
            layout=self._hardware.layout,
            num_blocks=self._hardware.num_blocks,
            max_running=self._hardware.max_running,
        )

    # ------------------------------------------------------------ what comes in

    def receive(self, events: list[Event]) -> None:
        """Receives events, which are handled when the running step ends."""
        self._inbox += events
        if self._stretch is None:
            self._run_next()
        else:
            self._cut(self._stretch)

    def settle(self, until_s: float) -> list[Said]:
        """Returns the new tokens that a live worker would have reported by this time."""
        if not self._told:
            return []
        num_over = bisect_right(self._ends_s, until_s)
        stretch = self._stretch
        if num_over == len(self._ends_s) and stretch is not None and stretch.num_decoding:
            # The last step has not been processed, even if it ends at this moment.
            num_over += bisect_right(stretch.ends_s, until_s, 0, len(stretch.ends_s) - 1)
        return self._unreported(self._num_earlier + num_over)

    def _unreported(self, until_step: int) -> list[Said]:
        """Returns the unreported tokens of all steps before `until_step`."""
        said: list[Said] = []
        # computed once, because most sequences have the same range of steps
        step, times_s = until_step, array("d")
        for seq_id, told in self._told.items():
            if told.step < until_step:
                if told.step != step:
                    step = told.step
                    times_s = self._times_s(step, until_step)
                said.append(_send(seq_id, told, times_s))
        return said

    def _times_s(self, step: int, until_step: int) -> "array[float]":
        """Returns the end times of the steps from `step` up to, but not including, `until_step`."""
        begin, end = step - self._num_earlier, until_step - self._num_earlier
        times_s = self._ends_s[begin:end]
        if end > (num_ended := len(self._ends_s)):
            assert self._stretch is not None
            times_s += self._stretch.ends_s[max(begin - num_ended, 0) : end - num_ended]
        return times_s

    # ------------------------------------------------------------ turns

    def _run_next(self) -> None:
        now_s = self._future.now_s
        while self._inbox:
            events, self._inbox = self._inbox, []
            self._has_news = True
            self._note_lengths(events)
            for event in events:
                self._perform(self.core.handle(event))
        if self.reports and now_s >= self._next_report_s:
            self._report()
        self._plan()
        if self._stretch is not None:
            self._has_news = True
        elif self.reports and self._has_news and not self._report_planned:
            self._report_planned = True
            self._future.plan(self._next_report_s, Rank.ROUTINE, self._on_report_due, None)

    def _plan(self) -> None:
        plan, effects = self.core.plan(self._future.now_s)
        self._perform(effects)
        self._flush()
        if plan is not None:
            self._begin(plan)
        elif (held_until_s := self.core.held_until_s) is not None:
            self._future.plan(held_until_s, Rank.ROUTINE, self._on_held_until, None)
        elif (stuck_until_s := self._decode.arrivals.stuck_until_s) is not None:
            due_s = max(stuck_until_s, self._future.now_s)
            self._future.plan(due_s, Rank.ROUTINE, self._on_held_until, None)

    def _on_held_until(self, _: None) -> None:
        if self._stretch is None:
            self._run_next()

    def _note_lengths(self, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, FromGateway):
                continue
            message = event.message
            if isinstance(message, Decode | Generate):
                # One token will already be sampled when the sequence begins to decode.
                token = base_of(message.sampling) + len(message.token_ids) + 1
                self._expected[message.seq_id] = _Told(message.limits.max_len, token)
            elif isinstance(message, Cancel):
                self._remove(message.seq_id)

    def _remove(self, seq_id: SeqId) -> None:
        self._expected.pop(seq_id, None)
        self._told.pop(seq_id, None)

    def _on_report_due(self, _: None) -> None:
        self._report_planned = False
        if self._stretch is None and self.reports:
            self._run_next()

    def _report(self) -> None:
        """Reports the worker's load. A report without changes is not sent. The times of later
        reports do not depend on this.
        """
        late_s = self._future.now_s - self._next_report_s
        num_left_out = late_s // REPORT_EVERY_S
        self._next_report_s = (
            self._next_report_s + num_left_out * REPORT_EVERY_S
            if num_left_out
            else self._future.now_s
        ) + REPORT_EVERY_S
        self._has_news = False
        load = self.core.load(self._transfers.num_leases_of(self.worker_id), {})
        # The gateway must know all tokens that the load counts. It would count unknown tokens as
        # another gateway's.
        self._said += self._unreported(self._num_steps_decoded)
        self._said.append(Said(load))
        self._num_earlier = self._num_steps_decoded
        del self._ends_s[:]

    @property
    def _num_steps_decoded(self) -> int:
        """Returns the number of decode steps before the running stretch."""
        return self._num_earlier + len(self._ends_s)

    # ------------------------------------------------------------ steps

    def _begin(self, plan: BatchPlan) -> None:
        rows = plan.rows
        num_decoding = min(self._decode.num_running, len(rows))
        price = price_of(rows, num_decoding)
        if self._crowd.watches:
            self._run_in_crowd(rows, price)
            return
        if price.num_new or not self._leaps:
            ends_s = array("d", (self._future.now_s + self._pricing.step_s(price),))
        else:
            ends_s = ends_of_steps(
                self._hardware.decode,
                price,
                self._num_alike(rows),
                now_s=self._future.now_s,
                due_s=self._next_report_s,
            )
        self._plan_end(self._run(rows, price, ends_s))

    def _run(self, rows: Sequence[Row], price: StepPrice, ends_s: "array[float]") -> _Stretch:
        self._stretch = _Stretch(rows, price.num_rows, ends_s, self._future.now_s)
        return self._stretch

    def _run_in_crowd(self, rows: Sequence[Row], price: StepPrice) -> None:
        """Begins one step. Its end depends on the other workers of the machine."""
        stretch = self._run(rows, price, array("d", (math.inf,)))
        on_end = partial(self._on_end_in_crowd, stretch)
        self._crowd.start(self.worker_id, price, self._pricing.step_s(price), on_end)

    def _on_end_in_crowd(self, stretch: _Stretch) -> None:
        stretch.ends_s[0] = stretch.planned_end_s = self._future.now_s
        self._on_end(stretch)

    def _num_alike(self, rows: Sequence[Row]) -> int:
        """Returns the number of steps up to the one in which an answer ends or a block fills up."""
        told, size = self._told, self._block_size
        until_end = min([told[row.seq_id].max_len - row.start for row in rows]) - 1
        return min(until_end, min([len(row.block_table) * size - row.start for row in rows]))

    def _plan_end(self, stretch: _Stretch) -> None:
        stretch.planned_end_s = stretch.ends_s[-1]
        self._future.plan(stretch.planned_end_s, Rank.STEP_END, self._on_end, stretch)

    def _cut(self, stretch: _Stretch) -> None:
        """Ends the stretch after the running step."""
        num_steps = bisect_left(stretch.ends_s, self._future.now_s) + 1
        if num_steps < len(stretch.ends_s):
            del stretch.ends_s[num_steps:]
            self._plan_end(stretch)

    def _on_end(self, stretch: _Stretch) -> None:
        if self._stretch is not stretch or stretch.planned_end_s != self._future.now_s:
            return  # the stretch was shortened, so another end is planned
        self._stretch = None
        self._perform(self._finish(stretch))
        self._run_next()

    def _finish(self, stretch: _Stretch) -> list[Effect]:
        """Passes a stretch's results to the core, as one step of the first step's duration."""
        ends_s, num_steps = stretch.ends_s, len(stretch.ends_s)
        self.num_steps += num_steps
        self.busy_s += ends_s[-1] - stretch.began_s
        if stretch.num_decoding:
            self._ends_s += ends_s
        times = StepTimes(0.0, ends_s[0] - stretch.began_s, 0.0)
        results = results_of(stretch.rows, num_steps)
        return self.core.finish(BatchResult(results, times), ends_s[-1])

    # ------------------------------------------------------------ frames and effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        told = self._told
        for effect in effects:
            if isinstance(effect, Emit):  # checked first, because most effects are messages
                message = effect.message
                if (
                    isinstance(message, Tokens)
                    and message.finish is None
                    and told[message.seq_id].has_begun
                ):
                    continue  # sent with the next report, or before the next placement
                self._say(message)
            elif isinstance(effect, EmitToAll):
                self.role = effect.message.role
                self._say(effect.message)
            else:
                self._transfers.perform(self, effect)

    def _flush(self) -> None:
        """Sends all messages of the current cycle as one frame."""
        news = self.pool.pop_events()
        if self._said or news:
            frame = Frame(self._said, events_of(news, self._block_size))
            self._said = []
            self._listener.on_frame(self.worker_id, frame)

    def _say(self, message: ToGateway) -> None:
        """Adds a message to the frame, after the unreported tokens of its sequence."""
        said, num_steps = self._said, self._num_steps_decoded
        match message:
            case Tokens(seq_id=seq_id, finish=finish):
                told = self._told[seq_id]
                if finish is not None or not told.has_begun:
                    said.append(_send(seq_id, told, self._times_s(told.step, num_steps), finish))
                if finish is not None:
                    self._remove(seq_id)
            case HandedOver(lease=None):
                said.append(Said(message))
            case GivenBack(seq_id=seq_id) | HandedOver(seq_id=seq_id):
                last = self._told.get(seq_id)
                if last is not None and last.step < num_steps:
                    said.append(_send(seq_id, last, self._times_s(last.step, num_steps)))
                self._remove(seq_id)
                said.append(Said(message))
            case PrefillDone():
                said.append(Said(message, (self._future.now_s,)))
            case DecodeStarted(seq_id=seq_id):
                told = self._told[seq_id] = self._expected.pop(seq_id)
                told.step = num_steps
                said.append(Said(message))
            case _:
                said.append(Said(message))


def ends_of_steps(
    cost: DecodeCost, price: StepPrice, num_steps: int, *, now_s: float, due_s: float
) -> "array[float]":
    """Returns the end times of equal decode steps. There are fewer steps if a report is due
    before.
    """
    num_rows, num_context = price.num_rows, price.num_context
    rows_s, context_s = cost.fixed_s + cost.row_s * num_rows, cost.context_s
    first_s = rows_s + context_s * num_context  # equal to `cost.seconds`, without the call
    if first_s > 0.0:  # no later step is shorter, because contexts grow
        num_steps = min(num_steps, max(int((due_s - now_s) / first_s), 0) + 2)
    # Uses NumPy, as there may be hundreds of steps. It adds one after the other, so sums are those
    # of single steps.
    contexts = np.arange(num_context - num_rows, num_context + num_steps * num_rows, num_rows)
    steps_s = contexts * context_s + rows_s
    steps_s[0] = now_s
    ends_s = array("d", np.add.accumulate(steps_s).tobytes())
    # including the first step that ends at or after the due time
    num_wanted = bisect_left(ends_s, due_s, 1) + 1
    return ends_s[1:num_wanted]


def price_of(rows: Sequence[Row], num_decoding: int) -> StepPrice:
    """Returns the sums that price a step. Each of the first `num_decoding` rows decodes one
    token.
    """
    num_new = squares = 0
    for row in rows[num_decoding:]:
        num_tokens, start = len(row.token_ids), row.start
        num_new += num_tokens
        squares += (2 * start + num_tokens) * num_tokens  # end² - start²
    num_context = sum([row.start for row in rows[:num_decoding]]) + num_decoding
    return StepPrice(num_new, squares, num_decoding, num_context)


def _send(
    seq_id: SeqId, told: _Told, times_s: "array[float]", finish: FinishReason | None = None
) -> Said:
    """Returns the message with the next tokens of an answer, which were sampled at these times."""
    num_tokens = len(times_s)
    tokens = _list_of(told.token, told.token + num_tokens)
    told.step += num_tokens
    told.token += num_tokens
    told.has_begun = True
    return Said(Tokens(seq_id, tokens, finish), times_s)


def results_of(rows: Sequence[Row], num_tokens: int) -> list[RowResult]:
    """Returns the tokens that follow each row; empty for a row that samples no token."""
    results: list[RowResult] = []
    for row in rows:
        sampling = row.sampling
        if sampling is None:
            results.append(NOTHING)
        else:
            first = base_of(sampling) + row.start + len(row.token_ids)
            results.append(RowResult(_tuple_of(first, first + num_tokens)))
    return results
