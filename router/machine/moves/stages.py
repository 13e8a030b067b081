"""The state of all moves: the sequences that must or may leave their workers, by stage.

Only this module stores the stage of a move. `router.machine.moves.moving` has the rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.messages import RequestId, Welcome, WorkerId
from router.cluster.view import ClusterView
from router.machine.flight import Attempt, Flight

RETRY_S = 1.0  # about the time between two load reports


def may_stay(info: Welcome, attempt: Attempt) -> bool:
    """True if a worker may go on decoding an attempt, by its role or because it was lent."""
    return info.role.decodes or (attempt.is_lent and info.is_fluid)


class MoveStage(Enum):
    """The stage of a move. Before LEAVING, the sequence runs at its source."""

    STRANDED = auto()  # no other worker has room for the sequence
    WAITING = auto()  # room is reserved; the sequence waits for its turn to be copied
    COPYING = auto()  # the target pulls the sequence's full blocks
    COPIED = auto()  # the full blocks are copied; the sequence waits for its turn to leave
    LEAVING = auto()  # the source was told to stop the sequence
    ARRIVING = auto()  # a new attempt at the target has started, and pulls the last blocks

    __hash__ = object.__hash__  # an enum's own hash is slow Python, and each event looks up here


@dataclass(slots=True)
class MoveWanted:
    """A sequence runs on a worker that must not decode it.

    The record is removed when the sequence has left its worker, or may stay there again.
    """

    since_s: float
    num_late: int = 0  # number of late copies
    not_before_s: float = 0.0  # time before which no other move starts


class Moves:
    """Moves by stage, each with its source worker; within a stage, in the order of entry."""

    def __init__(self) -> None:
        self.wanted: dict[RequestId, MoveWanted] = {}
        self.retry_s: float | None = None  # time of the next try for stranded sequences
        # Stages of all sequences that move or must move.
        self.stages: dict[RequestId, MoveStage] = {}
        self._at: dict[MoveStage, dict[RequestId, WorkerId]] = {stage: {} for stage in MoveStage}

    def want(self, request_id: RequestId, now_s: float) -> MoveWanted:
        """Records that a sequence must leave its worker. Returns the record, whether new or old."""
        return self.wanted.setdefault(request_id, MoveWanted(now_s))

    def at(self, stage: MoveStage) -> Mapping[RequestId, WorkerId]:
        """Returns the requests in a stage, each with the worker that it leaves."""
        return self._at[stage]

    def stage(self, request_id: RequestId) -> MoveStage | None:
        """Returns the stage of a request's move; None if the request does not move."""
        return self.stages.get(request_id)

    def enter(self, request_id: RequestId, stage: MoveStage, source: WorkerId) -> None:
        """Sets the stage of a move."""
        self.end(request_id)
        self.stages[request_id] = stage
        self._at[stage][request_id] = source

    def strand(self, request_id: RequestId, source: WorkerId, now_s: float) -> None:
        """Records that no worker has room for a sequence; the retry is due after `RETRY_S`."""
        retry_s = now_s + RETRY_S if self.retry_s is None else self.retry_s
        if self.stage(request_id) is not MoveStage.STRANDED:
            self.enter(request_id, MoveStage.STRANDED, source)
        self.retry_s = retry_s

    def end(self, request_id: RequestId) -> None:
        """Removes a move from its stage. The record that the sequence must leave is kept."""
        stage = self.stages.pop(request_id, None)
        if stage is not None:
            del self._at[stage][request_id]
        if not self._at[MoveStage.STRANDED]:
            self.retry_s = None

    def remove(self, request_id: RequestId) -> None:
        """Removes the record that a sequence must leave: it has left, or it may stay."""
        self.wanted.pop(request_id, None)
        if self.stage(request_id) is MoveStage.STRANDED:
            self.end(request_id)

    def under_way(self) -> bool:
        """True if any sequence has room reserved at a target and has not arrived there."""
        return len(self.stages) > len(self._at[MoveStage.STRANDED])

    def on_their_way(self) -> Iterator[WorkerId]:
        """Yields the sources of sequences that were told to stop and have not started again."""
        yield from self._at[MoveStage.LEAVING].values()
        yield from self._at[MoveStage.ARRIVING].values()

    def validate(self, flights: Mapping[RequestId, Flight], view: ClusterView) -> None:
        """Asserts that stages are consistent with attempts, and that no sequence was lost."""
        stranded = self._at[MoveStage.STRANDED]
        assert (self.retry_s is not None) == bool(stranded)
        assert self.stages == {i: stage for stage, ids in self._at.items() for i in ids}
        assert self.stages.keys() | self.wanted.keys() <= flights.keys()
        for request_id, flight in flights.items():
            self._validate_one(request_id, flight, view)

    def _validate_one(self, request_id: RequestId, flight: Flight, view: ClusterView) -> None:
        attempt, stage = flight.attempt, self.stage(request_id)
        if attempt is None:
            assert stage is None
            assert request_id not in self.wanted
            return
        if stage is MoveStage.ARRIVING:
            assert attempt.is_moved
            assert attempt.kv_ready_s is None
        elif stage is MoveStage.STRANDED:
            assert attempt.is_decoding
            assert attempt.move is None
            assert request_id in self.wanted
        else:
            assert (attempt.move is None) == (stage is None)
            if stage is not None:
                assert self._at[stage][request_id] == attempt.decode
            elif attempt.is_decoding:
                assert may_stay(view.workers[attempt.decode].info, attempt)
                assert request_id not in self.wanted
        gathers = attempt.move is not None and attempt.move.gather_until_s is not None
        assert not gathers or stage is MoveStage.COPIED
