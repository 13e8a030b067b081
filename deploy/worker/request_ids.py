"""The ids of the requests of which a worker has sequences, for its log lines."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.log_context import REQUEST, request_ids
from engine.messages import SeqId

MAX_KEPT = 8192  # of the latest sequences


class RequestIds:
    """The ids of each sequence's request. One thread notes them, any thread may log with them."""

    def __init__(self) -> None:
        self._client_ids: dict[SeqId, str] = {}  # of those that have one, oldest first

    def record(self, seq_id: SeqId, client_id: str) -> None:
        """Keeps what the client calls the request. Of very many the oldest are forgotten."""
        if not client_id:
            return
        self._client_ids.pop(seq_id, None)
        self._client_ids[seq_id] = client_id
        if len(self._client_ids) > MAX_KEPT:
            del self._client_ids[next(iter(self._client_ids))]

    @contextmanager
    def logged(self, seq_id: SeqId) -> Iterator[None]:
        """Lines that are logged inside have the ids of the sequence's request."""
        own_id = seq_id.partition(".")[0]  # a router adds the number of its attempt
        token = REQUEST.set(request_ids(own_id, self._client_ids.get(seq_id)))
        try:
            yield
        finally:
            REQUEST.reset(token)
