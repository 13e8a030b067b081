"""The state of all moves: the sequences that must leave their workers, by stage.

The stage of a move is stored here and nowhere else. `router.machine.moves.moving` has the rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from engine.messages import RequestId, Welcome, WorkerId
from router.cluster.view import ClusterView
from router.machine.flight import Attempt, Flight

RETRY_S = 1.0  # about the time between two load reports


def may_stay(info: Welcome, attempt: Attempt) -> bool:
    """True if a worker may go on decoding an attempt, by its role or because it was lent to it."""
    return info.role.decodes or (attempt.is_lent and info.is_fluid)


class MoveStage(Enum):
    """The stage of a move. Until LEAVING the sequence runs at its source."""

    STRANDED = auto()  # no worker has room for the sequence
    WAITING = auto()  # room is reserved; the sequence waits for its turn to be copied
    COPYING = auto()  # the target pulls its full blocks
    COPIED = auto()  # the blocks are copied, or none is full; it waits for its turn to leave
    LEAVING = auto()  # the source was told to stop it
    ARRIVING = auto()  # the attempt at the target has replaced it, and the target pulls the rest

    __hash__ = object.__hash__  # an enum's own hash runs in Python, and each event looks up here


@dataclass(slots=True)
class MoveWanted:
    """A sequence runs on a worker that must not decode it. Removed when it left or may stay."""

    since_s: float
    num_late: int = 0  # copies that were late
    not_before_s: float = 0.0  # no other move starts earlier


class Moves:
    """Moves by stage, each with its source; within a stage, in the order of entry."""

    def __init__(self) -> None:
        self.wanted: dict[RequestId, MoveWanted] = {}
        self.retry_s: float | None = None  # next try for stranded sequences
        self.stages: dict[RequestId, MoveStage] = {}  # by request, for all that move or must
        self._at: dict[MoveStage, dict[RequestId, WorkerId]] = {stage: {} for stage in MoveStage}

    def want(self, request_id: RequestId, now_s: float) -> MoveWanted:
        """Records that a sequence must leave its worker. Returns the record, new or old."""
        return self.wanted.setdefault(request_id, MoveWanted(now_s))

    def at(self, stage: MoveStage) -> Mapping[RequestId, WorkerId]:
        """Returns the requests in a stage, with the workers that they leave."""
        return self._at[stage]

    def stage(self, request_id: RequestId) -> MoveStage | None:
        """Returns the stage of a request's move; None if it does not move."""
        return self.stages.get(request_id)

    def enter(self, request_id: RequestId, stage: MoveStage, source: WorkerId) -> None:
        """Puts a move into a stage."""
        self.end(request_id)
        self.stages[request_id] = stage
        self._at[stage][request_id] = source

    def strand(self, request_id: RequestId, source: WorkerId, now_s: float) -> None:
        """Records that no worker has room; the retry is due after `RETRY_S`."""
        retry_s = now_s + RETRY_S if self.retry_s is None else self.retry_s
        if self.stage(request_id) is not MoveStage.STRANDED:
            self.enter(request_id, MoveStage.STRANDED, source)
        self.retry_s = retry_s

    def end(self, request_id: RequestId) -> None:
        """Removes a move from its stage. The record that the sequence must leave stays."""
        stage = self.stages.pop(request_id, None)
        if stage is not None:
            del self._at[stage][request_id]
        if not self._at[MoveStage.STRANDED]:
            self.retry_s = None

    def remove(self, request_id: RequestId) -> None:
        """Removes the record: the sequence has left its worker, or may stay there."""
        self.wanted.pop(request_id, None)
        if self.stage(request_id) is MoveStage.STRANDED:
            self.end(request_id)

    def under_way(self) -> bool:
        """True if any sequence has room reserved at a target, or has not arrived there yet."""
        return len(self.stages) > len(self._at[MoveStage.STRANDED])

    def on_their_way(self) -> Iterator[WorkerId]:
        """Yields the source of each sequence that was told to stop and has not started again."""
        yield from self._at[MoveStage.LEAVING].values()
        yield from self._at[MoveStage.ARRIVING].values()

    def validate(self, flights: Mapping[RequestId, Flight], view: ClusterView) -> None:
        """Asserts that stages agree with the attempts, and that no sequence was lost."""
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
