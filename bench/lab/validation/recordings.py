"""Reads a gateway's recording: the requests, and the times of the workers' prompts and steps.

A recording (`router.recording.records`) contains all events and effects of one gateway's router,
with their times on the gateway's clock. All messages in one frame of a worker have the same time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.messages import (
    Decode,
    DecodeStarted,
    FinishReason,
    Generate,
    KvReady,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    SeqId,
    ToGateway,
    Tokens,
    Welcome,
    WorkerId,
)
from router.machine.events import Arrived, ClientGone, FromWorker, Stepped, WorkerJoined
from router.machine.requests import Request
from router.recording.records import Recorded, read


@dataclass(slots=True)
class RecordedRequest:
    """One request and its answer; `times_s` has the time of each token.

    A client may close its connection because it found its stop string. So such a request counts as
    answered.
    """

    request: Request
    arrived_s: float
    times_s: list[float] = field(default_factory=list)
    is_finished: bool = False
    client_left: bool = False


@dataclass(slots=True)
class RecordedAttempt:
    """One placement of a request. All times are those at which the gateway was informed."""

    seq_id: SeqId
    num_tokens: int  # tokens of the prefill
    hands_over: bool
    prefill_worker: WorkerId
    sent_s: float
    decode_worker: WorkerId | None = None
    num_cached_tokens: int = 0
    started_s: float | None = None
    done_s: float | None = None
    ready: KvReady | None = None
    ready_s: float | None = None
    decode_started_s: float | None = None

    @property
    def computing_s(self) -> tuple[float, float] | None:
        """Returns begin and end of the prefill; None if the recording lacks one of them."""
        if self.started_s is None or self.done_s is None:
            return None
        return self.started_s, self.done_s


@dataclass(slots=True)
class DecodeStep:
    """A step of a decode worker. For each row it has the context tokens, including the new
    token.
    """

    at_s: float
    rows: dict[SeqId, int]
    finished: set[SeqId] = field(default_factory=set)

    @property
    def num_context(self) -> int:
        """Returns the number of context tokens that all rows read."""
        return sum(self.rows.values())


@dataclass(slots=True)
class RecordedRun:
    """The contents of a recording. The caller may add `gateway_cpu_s`, which a recording does not
    contain.
    """

    asked: dict[RequestId, RecordedRequest] = field(default_factory=dict)
    attempts: dict[SeqId, RecordedAttempt] = field(default_factory=dict)
    workers: dict[WorkerId, Welcome] = field(default_factory=dict)
    steps: dict[WorkerId, list[DecodeStep]] = field(default_factory=dict)
    gateway_cpu_s: float = 0.0

    def note(self, recorded: Recorded) -> None:
        """Processes the next record."""
        now_s = recorded.now_s
        match recorded.event:
            case WorkerJoined(info):
                self.workers[info.worker_id] = info
            case Arrived(request):
                self.asked[request.request_id] = RecordedRequest(request, now_s)
            case ClientGone(request_id) if request_id in self.asked:
                self.asked[request_id].client_left = True
            case FromWorker(worker_id, message):
                self._on_message(worker_id, message, now_s)
            case Stepped(worker_id, messages):
                for message in messages:
                    self._on_message(worker_id, message, now_s)
        for kind, effect in recorded.effects:
            if kind == "Update":
                self._on_update(msgspec.msgpack.decode(effect, type=_Updated), now_s)
            elif kind == "SendTo":
                self._on_send(msgspec.msgpack.decode(effect, type=_Sent), now_s)

    def _on_update(self, update: "_Updated", now_s: float) -> None:
        asked = self.asked.get(update.request_id)
        if asked is not None:
            asked.times_s += [now_s] * len(update.token_ids)
            asked.is_finished = update.outcome is not None and update.outcome.reason is not None

    def _on_send(self, sent: "_Sent", now_s: float) -> None:
        message = sent.message
        if message.type in (Prefill.__name__, Generate.__name__):
            hands_over = message.type == Prefill.__name__
            num_tokens = len(message.token_ids)
            self.attempts[message.seq_id] = RecordedAttempt(
                message.seq_id, num_tokens, hands_over, sent.worker_id, now_s
            )
        elif message.type == Decode.__name__ and message.seq_id in self.attempts:
            self.attempts[message.seq_id].decode_worker = sent.worker_id

    def _on_message(self, worker_id: WorkerId, message: ToGateway, now_s: float) -> None:
        attempt = self.attempts.get(getattr(message, "seq_id", SeqId("")))
        if attempt is None:
            return
        match message:
            case PrefillStarted(_, num_cached_tokens):
                attempt.started_s, attempt.num_cached_tokens = now_s, num_cached_tokens
            case PrefillDone():
                attempt.done_s = now_s
            case KvReady():
                attempt.ready, attempt.ready_s = message, now_s
            case DecodeStarted():
                attempt.decode_started_s = now_s
            case Tokens():
                self._on_tokens(worker_id, message, now_s)

    def _on_tokens(self, worker_id: WorkerId, message: Tokens, now_s: float) -> None:
        request_id, _, _ = message.seq_id.rpartition(".")
        asked = self.asked.get(RequestId(request_id))
        if asked is None:
            return
        steps = self.steps.setdefault(worker_id, [])
        if not steps or steps[-1].at_s != now_s:
            steps.append(DecodeStep(now_s, {}))
        # these tokens are delivered after this event
        steps[-1].rows[message.seq_id] = len(asked.request.token_ids) + len(asked.times_s)
        if message.finish is not None:
            steps[-1].finished.add(message.seq_id)


def read_run(lines: Iterable[bytes]) -> RecordedRun:
    """Reads a recording and returns its contents. Raises ProtocolError."""
    told = RecordedRun()
    for recorded in read(lines):
        told.note(recorded)
    return told


# ---------------------------------------------------------------- effects, as far as they are read


class _Message(msgspec.Struct):
    type: str
    seq_id: SeqId = SeqId("")
    token_ids: list[int] = []


class _Sent(msgspec.Struct):
    worker_id: WorkerId
    message: _Message


class _Outcome(msgspec.Struct):
    reason: FinishReason | None = None  # None unless the request finished


class _Updated(msgspec.Struct):
    request_id: RequestId
    token_ids: list[int]
    outcome: _Outcome | None
