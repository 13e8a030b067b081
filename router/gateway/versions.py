"""Chooses the model version that serves a request.

A version has its own workers, router, tokenizer and fingerprint, so its KV can never reach another
version. The version is chosen once, before anything is computed. A request never changes its
version.

1. If the header `x-baton-version` names a version, that version serves the request; for an unknown
   name the status is 404.
2. The model's name chooses the line, which has all versions of one model. A request without a model
   name goes to the main line.
3. If the line's current version does not have the model's name, the versions that have it share the
   request.
4. Otherwise all versions of the line share the requests, in proportion to their weights.

A version that is leaving gets no requests. If all known versions are leaving, a call waits, even
with an unknown name, because the next version may have that name. A call also waits if it names a
version without a known worker. If a version has no workers, versions with workers share its
requests. The choice depends only on a key and the weights. So requests with the same key get the
same version until the weights change. A change of weights moves as few keys as possible to another
version.

`Tallies` counts the outcomes of each version's requests, so that a bad version can be withdrawn.
The counts are written and read in the event loop of the requests.
"""

import asyncio
import contextlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain

from engine.control import MAIN_LINE
from engine.messages import RequestId, WorkerId
from router.cluster.learning import MovedKv
from router.inbox.api_errors import ApiError
from router.machine.requests import Timeline
from router.port import RouterPort, WorkerStatus
from router.text.tokenizer import TextModel

VERSION_HEADER = "x-baton-version"
AFFINITY_HEADER = "x-baton-affinity"
SERVER_SHUTDOWN = "server_shutdown"  # error code during shutdown
STOPPING = "the server is stopping"
NO_WORKER = "no worker is known of a version that takes requests"
MAX_HELD = 1024  # maximum calls that wait for the first worker of their version


class NotReady(ApiError):
    """No version can serve the request yet.

    A version may serve the request after the version's first worker is known.
    """

    def __init__(self) -> None:
        super().__init__(NO_WORKER, code="not_ready", status=503)


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that can serve requests. Its own model name is the first of `model_names`."""

    name: str
    port: RouterPort
    text: TextModel
    model_names: tuple[str, ...]
    context_len: int
    weight: int = 1
    is_leaving: bool = False
    line: str = MAIN_LINE

    @property
    def max_len(self) -> int:
        """The maximum tokens of one request: the limit of the context, or of the KV memory at
        present.
        """
        return min(self.context_len, self.port.capacity_tokens() or self.context_len)


def by_weight(weights: Mapping[str, int], key: str) -> str:
    """Returns one of the names. Over many keys, each name is chosen in proportion to its weight.

    Each name gets a pseudo-random number computed from the key and the name. The number is
    exponentially distributed with the weight as its rate, and the lowest number wins. If all
    weights are zero, the first name is returned.
    """
    drawn = {name: -math.log(_uniform(key, name)) / w for name, w in weights.items() if w}
    return min(drawn or weights, key=lambda name: drawn.get(name, 0.0))


def _uniform(key: str, name: str) -> float:
    """Returns a pseudo-random number in (0, 1), computed from the key and the name."""
    digest = blake2b(key.encode(), digest_size=8, key=blake2b(name.encode()).digest()).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


def _able(
    served: Sequence[ServedVersion],
    coming: Mapping[str, str],
    model: str | None,
    version: str | None,
) -> list[ServedVersion]:
    stays = [each for each in served if not each.is_leaving]
    if not stays or version in coming:
        raise NotReady
    if model is not None and not any(model in each.model_names for each in served):
        raise NotReady if model in coming.values() else no_model(model)
    if version is not None:
        found = [each for each in stays if each.name == version]
        if not found:
            names = ", ".join(each.name for each in stays)
            raise ApiError(
                f"no version is called {version!r}; there are: {names}",
                param=VERSION_HEADER,
                code="version_not_found",
                status=404,
            )
        return found
    line = _line_of(served, model)
    stays = [each for each in stays if each.line == line]
    current = next(each for each in served if each.line == line)
    if model is not None and model not in current.model_names:
        stays = [each for each in stays if model in each.model_names]
        if not stays:
            raise NotReady if model in coming.values() else no_model(model)
    elif not stays:
        raise NotReady
    return [each for each in stays if each.weight] or stays


def _line_of(served: Sequence[ServedVersion], model: str | None) -> str:
    """Returns the first line that has a version with this model name.

    The line's current version may have another name.
    """
    return next(each.line for each in served if model is None or model in each.model_names)


def no_model(model: str) -> ApiError:
    """Returns the error for an unknown model name."""
    message = f"the model {model!r} does not exist"
    return ApiError(message, param="model", code="model_not_found", status=404)


class Versions:
    """All versions of a gateway, and their joint `RouterStatus`.

    The table is replaced as a whole, so that threads may read it. The first version in the table is
    the current version. The table is empty until a worker of any version is known.
    """

    def __init__(self, *served: ServedVersion) -> None:
        self.table: tuple[ServedVersion, ...] = served
        self._coming: Mapping[str, str] = {}  # versions without a known worker, with their models
        self._able: dict[tuple[str | None, str | None], list[ServedVersion]] = {}  # cached
        self.tallies = Tallies()
        self.num_running: Counter[str] = Counter()  # accepted requests without an end, by version
        # Events that this object counted, and events of the routers of removed versions.
        self._counted: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._changed = asyncio.Event()  # set when the table changes
        self._num_held = 0

    def stop(self) -> None:
        """Refuses all further requests."""
        self._is_stopping = True
        self._wake_held()

    def follow(
        self, table: tuple[ServedVersion, ...], coming: Mapping[str, str] | None = None
    ) -> None:
        """Replaces the table of versions. Event counts of removed versions are kept.

        `coming` maps versions that cannot be chosen yet to their models.
        """
        left = [each.port for each in table]
        for gone in self.table:
            if gone.port not in left:
                self._counted.update(gone.port.counters())
        self.table, self._coming = table, coming or {}
        self._able = {}  # replaced last: threads may still fill the old cache
        self._wake_held()

    async def hold(self, seen: tuple[ServedVersion, ...], timeout_s: float) -> bool:
        """Waits until the table differs from `seen`, or until calls are no longer accepted.

        Returns False if nothing changed in time, or if too many calls already wait.
        """
        if self.table is not seen or self._is_stopping:
            return True
        if timeout_s <= 0.0 or self._num_held >= MAX_HELD:
            return False
        self._num_held += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._num_held -= 1

    def _wake_held(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def choose(
        self, *, key: str, model: str | None = None, version: str | None = None
    ) -> ServedVersion:
        """Returns the version for a request. Thread-safe. Raises ApiError if there is none."""
        if self._is_stopping:
            raise ApiError(STOPPING, code=SERVER_SHUTDOWN, status=503)
        known = self._able
        able = known.get((model, version))
        if able is None:  # errors are not cached, so only served names are
            able = known[model, version] = _able(self.table, self._coming, model, version)
        if len(able) == 1:
            return able[0]
        ready = [each for each in able if each.port.readiness() is None]
        name = by_weight({each.name: each.weight for each in ready or able}, key)
        if ready and len(ready) < len(able):
            wanted = by_weight({each.name: each.weight for each in able}, key)
            if wanted != name:
                with self._lock:
                    self._counted["version passed over", wanted] += 1
        return next(each for each in able if each.name == name)

    @property
    def model_name(self) -> str:
        """The name of the current version's model; empty while no version is known."""
        return self.table[0].model_names[0] if self.table else ""

    def takes(self, served: ServedVersion) -> bool:
        """True if a version that was chosen before still accepts new requests."""
        return any(each.port is served.port and not each.is_leaving for each in self.table)

    def models(self) -> dict[str, int]:
        """The maximum tokens of a request, by model name.

        The value is the minimum over all versions with the name.
        """
        found: dict[str, int] = {}
        names = dict.fromkeys(chain.from_iterable(each.model_names for each in self.table))
        for name in names:
            with contextlib.suppress(ApiError):  # all versions with this name are leaving
                found[name] = min(
                    each.max_len for each in _able(self.table, self._coming, name, None)
                )
        return found

    # ------------------------------------------------------------ methods of RouterStatus

    def readiness(self) -> str | None:
        """Returns None if requests without a version can be served; otherwise the reason."""
        if self._is_stopping:
            return STOPPING
        try:
            able = _able(self.table, self._coming, None, None)
        except ApiError as error:
            return error.message
        reasons = [each.port.readiness() for each in able]
        return None if None in reasons else reasons[0]

    def fingerprint(self) -> str:
        """The current version's fingerprint; empty while no version is known."""
        return self.table[0].port.fingerprint() if self.table else ""

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """The workers of all versions."""
        found: dict[WorkerId, WorkerStatus] = {}
        for each in self.table:
            found.update(each.port.workers())
        return found

    def queue_len(self) -> int:
        """The number of waiting requests of all versions."""
        return sum(each.port.queue_len() for each in self.table)

    def queued_s(self) -> float:
        """The predicted seconds to compute the waiting prompts of all versions."""
        return sum(each.port.queued_s() for each in self.table)

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """The severed pairs of workers of all versions."""
        found: dict[tuple[WorkerId, WorkerId], float] = {}
        for each in self.table:
            found.update(each.port.severed())
        return found

    def transfers(self) -> list[MovedKv]:
        """The KV transfers between workers of all versions, by pair of workers."""
        return [moved for each in self.table for moved in each.port.transfers()]

    def timelines(self, request_ids: Collection[RequestId]) -> Mapping[RequestId, Timeline]:
        """Returns the present timelines of all given requests that the routers have."""
        found: dict[RequestId, Timeline] = {}
        for each in self.table:
            found.update(each.port.timelines(request_ids))
        return found

    def count(self, event: str, reason: str) -> None:
        """Counts an event that belongs to no version."""
        with self._lock:
            self._counted[event, reason] += 1

    def counters(self) -> Mapping[tuple[str, str], int]:
        """The numbers of events by event and reason, over all versions."""
        total = self._counted.copy()
        for each in self.table:
            total.update(each.port.counters())
        return total


MAX_VERSIONS = 16  # maximum versions kept: the latest whose requests ended
LONGEST_FOR_S = 300.0  # seconds per span: the longest sequence is of the last two spans

CountHung = Callable[[float], Mapping[str, int]]  # given a time in seconds, counts by version


@dataclass(slots=True)
class VersionTally:
    """The numbers of ended requests of one version in this process."""

    ended: int = 0
    failed: int = 0
    late: int = 0
    longest: dict[int, int] = field(default_factory=dict)  # maximum tokens by span, last two

    def longest_len(self, now_s: float) -> int:
        """Returns the length of the longest recent sequence, in tokens."""
        span = int(now_s // LONGEST_FOR_S)
        return max(self.longest.get(span, 0), self.longest.get(span - 1, 0))


class Tallies:
    """The tallies of all versions, by name."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, VersionTally] = OrderedDict()
        self.hung: CountHung = lambda _: {}

    def of(self, name: str) -> VersionTally:
        """Returns the tally of a version; a tally of zeros if no request of the version has
        ended.
        """
        return self._by_name.get(name) or VersionTally()

    def record(self, name: str, *, failed: bool, late: bool, num_tokens: int, now_s: float) -> None:
        """Records the outcome and the length of one answer that has ended."""
        tally = self._by_name.get(name)
        if tally is None:
            tally = self._by_name[name] = VersionTally()
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_VERSIONS:
            self._by_name.popitem(last=False)
        tally.ended += 1
        tally.failed += failed
        tally.late += late
        span, longest = int(now_s // LONGEST_FOR_S), tally.longest
        if span not in longest:
            tally.longest = longest = {span - 1: longest.get(span - 1, 0), span: 0}
        longest[span] = max(longest[span], num_tokens)
