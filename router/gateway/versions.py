"""Which version of the model a request is served by, and what the HTTP side knows of each.

A version has workers, a router, a tokenizer and a fingerprint of its own, so nothing of its KV can
get to another one. Which of them serves a request is decided once, before anything is computed, and
stays so: a request is never begun in one and gone on with in another.

1. The header `x-baton-version` names one: that one, or 404.
2. The model's name is that of versions which are not called like the current one: one of these.
3. Else any, in proportion to their weights.

Who is leaving takes none, and while nobody else is known the answer is 503, whatever was asked for:
who comes may well be called so. While one has no workers, those that have some share what would be
its. Which one it is follows from a key and the weights alone: the same key gets the same version
until the weights change, and then as few keys as possible get another one.
"""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

from engine.messages import WorkerId
from router.inbox.api_errors import ApiError
from router.port import RouterPort, WorkerStatus
from router.text.tokenizer import TextModel

VERSION_HEADER = "x-baton-version"
AFFINITY_HEADER = "x-baton-affinity"
SERVER_SHUTDOWN = "server_shutdown"  # the code of errors
STOPPING = "the server is stopping"
NOBODY = "no worker is known of a version that takes requests"


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version that requests can be given to. Of its model's names, the first is its own."""

    name: str
    port: RouterPort
    text: TextModel
    model_names: tuple[str, ...]
    context_len: int
    weight: int = 1
    is_leaving: bool = False

    @property
    def max_len(self) -> int:
        """Tokens that one request may have: as context and workers' KV memory allow just now."""
        return min(self.context_len, self.port.capacity_tokens() or self.context_len)


def by_weight(weights: Mapping[str, int], key: str) -> str:
    """One of the names; of many keys each gets its share. Without any weight, the first one.

    Each draws a number that follows from the key and its name, exponentially distributed at the
    rate of its weight, and the least one wins.
    """
    drawn = {name: -math.log(_uniform(key, name)) / w for name, w in weights.items() if w}
    return min(drawn or weights, key=lambda name: drawn.get(name, 0.0))


def _uniform(key: str, name: str) -> float:
    """A number in (0, 1) that follows from both."""
    digest = blake2b(key.encode(), digest_size=8, key=blake2b(name.encode()).digest()).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


def _able(
    served: Sequence[ServedVersion], model: str | None, version: str | None
) -> list[ServedVersion]:
    stays = [each for each in served if not each.is_leaving]
    if not stays:
        raise ApiError(NOBODY, code="not_ready", status=503)
    if model is not None and not any(model in each.model_names for each in served):
        raise no_model(model)
    if version is not None:
        found = [each for each in stays if each.name == version]
        if not found:
            there = ", ".join(each.name for each in stays)
            raise ApiError(
                f"no version is called {version!r}; there are: {there}",
                param=VERSION_HEADER,
                code="version_not_found",
                status=404,
            )
        return found
    if model is not None and model not in served[0].model_names:
        stays = [each for each in stays if model in each.model_names]
        if not stays:
            raise no_model(model)
    return [each for each in stays if each.weight] or stays


def no_model(model: str) -> ApiError:
    """The error for a name that no model has."""
    message = f"the model {model!r} does not exist"
    return ApiError(message, param="model", code="model_not_found", status=404)


class Versions:
    """All versions of a gateway; read as a router's status, all of them taken together.

    The table is replaced as a whole, so that threads may read it. Its first one is current. It is
    empty until a worker of any version is known.
    """

    def __init__(self, *served: ServedVersion) -> None:
        self.table: tuple[ServedVersion, ...] = served
        self._num_requests: Counter[str] = Counter()
        self._counted: Counter[tuple[str, str]] = Counter()  # here, or by routers that are gone
        self._lock = threading.Lock()
        self._is_stopping = False

    def stop(self) -> None:
        """From now on no request is taken."""
        self._is_stopping = True

    def follow(self, table: tuple[ServedVersion, ...]) -> None:
        """From now on these are the versions. What those that are gone have counted is kept."""
        left = [each.port for each in table]
        for gone in self.table:
            if gone.port not in left:
                self._counted.update(gone.port.counters())
        self.table = table

    def choose(
        self, *, key: str, model: str | None = None, version: str | None = None
    ) -> ServedVersion:
        """The version for a request, from any thread. Raises ApiError where there is none."""
        if self._is_stopping:
            raise ApiError(STOPPING, code=SERVER_SHUTDOWN, status=503)
        able = _able(self.table, model, version)
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
        """Of the current version; empty while none is known."""
        return self.table[0].model_names[0] if self.table else ""

    def takes(self, served: ServedVersion) -> bool:
        """Whether new requests may still be given to what was chosen a moment ago."""
        return any(each.port is served.port and not each.is_leaving for each in self.table)

    def models(self) -> dict[str, int]:
        """The most tokens of a request by name: of the version that may answer with the fewest."""
        found: dict[str, int] = {}
        names = dict.fromkeys(chain.from_iterable(each.model_names for each in self.table))
        for name in names:
            with contextlib.suppress(ApiError):  # who is called so is leaving
                found[name] = min(each.max_len for each in _able(self.table, name, None))
        return found

    @contextlib.contextmanager
    def serving(self, served: ServedVersion) -> Iterator[None]:
        """Counts a request of a version."""
        self._num_requests[served.name] += 1
        try:
            yield
        finally:
            self._num_requests[served.name] -= 1

    def num_requests(self, name: str) -> int:
        """Accepted and not over."""
        return self._num_requests[name]

    # ------------------------------------------------------------ as RouterStatus

    def readiness(self) -> str | None:
        """None when a version can serve that requests are given to unless they name another."""
        if self._is_stopping:
            return STOPPING
        try:
            able = _able(self.table, None, None)
        except ApiError as error:
            return error.message
        reasons = [each.port.readiness() for each in able]
        return None if None in reasons else reasons[0]

    def fingerprint(self) -> str:
        """Of the current version; empty while none is known."""
        return self.table[0].port.fingerprint() if self.table else ""

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """Of all versions."""
        found: dict[WorkerId, WorkerStatus] = {}
        for each in self.table:
            found.update(each.port.workers())
        return found

    def queue_len(self) -> int:
        """Of all versions."""
        return sum(each.port.queue_len() for each in self.table)

    def queued_s(self) -> float:
        """Of all versions."""
        return sum(each.port.queued_s() for each in self.table)

    def count(self, event: str, reason: str) -> None:
        """One more of something that concerns no version alone."""
        with self._lock:
            self._counted[event, reason] += 1

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Of all versions."""
        total = self._counted.copy()
        for each in self.table:
            total.update(each.port.counters())
        return total
