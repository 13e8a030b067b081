"""Compares each answer with that request's answer in an undisturbed run; measures waits. Pure.

A request is *lost* if its last stream is not correct. In a correct stream, each choice has exactly
one finish reason and no content after it. Then follow one usage chunk, one end mark, and nothing
else. A request is *changed* if it ends correctly, but text, finish reasons, log-probabilities or
usage differ from the undisturbed run. A request is also changed if the text received before a
broken connection is not a prefix of the undisturbed answer.

A connection may break only if a gateway process was killed, or was stopped until it was replaced.
Otherwise the request counts as lost, even if the client sent it again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from bench.chaos.plan import BREAKS_CONNECTIONS, FaultKind
from bench.chaos.streams import ReceivedStream, ReceivedUsage
from engine.control import with_role
from engine.messages import Role

NOTICED_S = 0.5  # a gap may begin up to this many seconds before the reported begin of its fault
# a fault affects a stream that is silent for at least this long when the fault begins
SILENCE_S = 0.5
# A connection breaks within this time after its gateway dies, since clients are on the same
# machine.
BREAKS_WITHIN_S = 1.0
# A silent gateway counts as lost after 5 s. If no other gateway is lost, it is killed 5 s later.
REPLACED_AFTER_S = 10.0
# a longer silence means that the gateway was stopped: a running one sends twice a second
QUIET_BEFORE_S = 1.0


@dataclass(frozen=True, slots=True)
class ChoiceSaid:
    """The text, finish reasons and log-probabilities of one choice."""

    text: str
    finish: str
    logprobs: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """The content of an answer, without arrival times and without the cuts between chunks."""

    choices: tuple[ChoiceSaid, ...]
    usage: ReceivedUsage


class RequestEnd(StrEnum):
    """The outcome of a request: correct, changed or lost."""

    SAME = "same"
    CHANGED = "changed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    """The outcome of a request, and the reason for it."""

    end: RequestEnd
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was injected. Its times use the same clock as the streams' times."""

    kind: FaultKind
    victim: str
    begun_s: float
    ended_s: float
    detail: str = ""
    failure: str | None = None  # why the fault was injected only in part; None if it was complete
    # role of the victim when the fault began; None if the victim is no worker
    role: Role | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {with_role(self.victim, self.role)}"


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest silence inside an answer, and the fault that was active then."""

    seconds: float
    fault: Injected | None = None
    request: int = -1


def disorder(stream: ReceivedStream, num_choices: int) -> str | None:
    """Returns why a stream is not one complete answer, or None if the stream is complete."""
    if stream.failure is not None:
        return stream.failure
    finished: set[int] = set()
    for piece in stream.pieces:
        if not 0 <= piece.choice < num_choices:
            return f"there is no choice {piece.choice}"
        if piece.choice in finished:
            again = "finished again" if piece.finish is not None else "went on after its end"
            return f"choice {piece.choice} {again}"
        if piece.finish is not None:
            finished.add(piece.choice)
    if len(finished) < num_choices:
        return f"{num_choices - len(finished)} of {num_choices} choices did not finish"
    if len(stream.usages) != 1:
        return f"usage came {len(stream.usages)} times"
    if (stream.num_done, stream.num_after_done) != (1, 0):
        return f"the end was marked {stream.num_done} times"
    return None


def reply_of(stream: ReceivedStream, num_choices: int) -> Reply:
    """Returns the content of a stream for which `disorder` is None."""
    return Reply(
        tuple(_said(stream, choice) for choice in range(num_choices)), usage=stream.usages[0]
    )


def judge(
    expected: Reply, streams: Sequence[ReceivedStream], deaths: Sequence[Injected]
) -> RequestVerdict:
    """Judges a request by all its streams. There is one stream for each time the request was sent.

    `deaths` are the faults of gateway processes, including faults that broke no connection.
    """
    num_choices = len(expected.choices)
    for stream in streams[:-1]:
        if not any(is_broken_by(death, stream) for death in deaths):
            return RequestVerdict(RequestEnd.LOST, f"its connection broke: {stream.failure}")
        if (what := _departure(expected, stream)) is not None:
            return RequestVerdict(RequestEnd.CHANGED, f"before its connection broke: {what}")
    last = streams[-1]
    if (what := disorder(last, num_choices)) is not None:
        return RequestVerdict(RequestEnd.LOST, what)
    if (what := _difference(expected, reply_of(last, num_choices))) is not None:
        return RequestVerdict(RequestEnd.CHANGED, what)
    return RequestVerdict(RequestEnd.SAME)


def is_broken_by(death: Injected, stream: ReceivedStream) -> bool:
    """Returns True if the time of a gateway's death explains a broken connection.

    It is unknown which gateway served the connection. A stopped gateway breaks its connections only
    when it is replaced. If it is continued before that, it breaks none.
    """
    from_s = death.begun_s
    if death.kind is FaultKind.STOP_GATEWAY:
        from_s += REPLACED_AFTER_S - QUIET_BEFORE_S
    was_connected = stream.sent_s - NOTICED_S <= death.ended_s
    return was_connected and from_s <= stream.ended_s <= death.ended_s + BREAKS_WITHIN_S


def _said(stream: ReceivedStream, choice: int) -> ChoiceSaid:
    pieces = [piece for piece in stream.pieces if piece.choice == choice]
    return ChoiceSaid(
        "".join(piece.text for piece in pieces),
        next((piece.finish for piece in pieces if piece.finish is not None), ""),
        tuple(entry for piece in pieces for entry in piece.logprobs),
    )


def _departure(expected: Reply, stream: ReceivedStream) -> str | None:
    """Returns where a partial answer differs from the expected answer, or None."""
    for choice, whole in enumerate(expected.choices):
        said = _said(stream, choice)
        if not whole.text.startswith(said.text):
            return f"choice {choice} began with {said.text!r}, not {whole.text!r}"
        if whole.logprobs[: len(said.logprobs)] != said.logprobs:
            return f"choice {choice} began with other log-probabilities"
        if said.finish not in ("", whole.finish):
            return f"choice {choice} ended by {said.finish}, not {whole.finish}"
    return None


def _difference(expected: Reply, found: Reply) -> str | None:
    for choice, (one, other) in enumerate(zip(expected.choices, found.choices, strict=True)):
        if one.text != other.text:
            return f"choice {choice} said {other.text!r}, not {one.text!r}"
        if one.finish != other.finish:
            return f"choice {choice} ended by {other.finish}, not {one.finish}"
        if one.logprobs != other.logprobs:
            return f"choice {choice} has other log-probabilities"
    if expected.usage != found.usage:
        return f"usage is {found.usage}, not {expected.usage}"
    return None


# ---------------------------------------------------------------- time


def gaps(streams: Sequence[ReceivedStream]) -> list[tuple[float, float]]:
    """Returns begin and end of each silence between two pieces of a request. A silence may include
    a change of connection.
    """
    times_s = [piece.at_s for stream in streams for piece in stream.pieces]
    return list(pairwise(times_s))


def longest_stall(
    requests: Sequence[Sequence[ReceivedStream]], faults: Sequence[Injected]
) -> Stall:
    """Returns the longest stall of all requests. The wait for a first piece is not a stall."""
    longest, where = (0.0, 0.0), -1
    for number, streams in enumerate(requests):
        for gap in gaps(streams):
            if gap[1] - gap[0] > longest[1] - longest[0]:
                longest, where = gap, number
    return Stall(longest[1] - longest[0], _cause(longest, faults), where)


def affected(
    requests: Sequence[Sequence[ReceivedStream]], faults: Iterable[Injected]
) -> dict[FaultKind, int]:
    """Returns the number of requests that each kind of fault disturbed.

    A request is disturbed if it was silent for `SILENCE_S` around the fault's begin. It is also
    disturbed if it was in flight at that time and was placed or sent again.
    """
    found: dict[FaultKind, set[int]] = {}
    for fault in faults:
        hit = found.setdefault(fault.kind, set())
        hit |= {number for number, streams in enumerate(requests) if _is_hit(streams, fault)}
    return {kind: len(numbers) for kind, numbers in found.items()}


def _is_hit(streams: Sequence[ReceivedStream], fault: Injected) -> bool:
    silences = [*gaps(streams), *_waits(streams)]
    if any(
        begun_s - NOTICED_S <= fault.begun_s <= ended_s and ended_s - begun_s >= SILENCE_S
        for begun_s, ended_s in silences
    ):
        return True
    if fault.kind in BREAKS_CONNECTIONS:
        return any(is_broken_by(fault, stream) for stream in streams[:-1])
    last = streams[-1]
    return last.num_attempts > 1 and last.sent_s <= fault.begun_s <= last.ended_s


def _waits(streams: Sequence[ReceivedStream]) -> list[tuple[float, float]]:
    """Returns the interval from the first sending of a request to its first piece, or none."""
    first = next((piece.at_s for stream in streams for piece in stream.pieces), None)
    return [] if first is None else [(streams[0].sent_s, first)]


def _cause(gap: tuple[float, float], faults: Sequence[Injected]) -> Injected | None:
    """Returns the fault that explains a gap: the first fault that began in the gap or shortly
    before it. If there is none, returns a fault that was active during the gap.
    """
    begun_s, ended_s = gap
    began = [f for f in faults if begun_s - NOTICED_S <= f.begun_s <= ended_s]
    went_on = [f for f in faults if f.begun_s <= ended_s and begun_s <= f.ended_s]
    return next(iter([*began, *went_on]), None)
