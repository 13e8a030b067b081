"""Requests that share a prompt, held back while the first of them has it computed.

Several answers to one prompt are a *group*: a leader and its followers. Followers wait outside of
the queue until the leader's prompt is computed and its KV is where it decodes. There they find all
its full blocks and share them. Only the last block of a prompt, if it is not full, belongs to each
answer alone. That is copy-on-write with the block as its unit, since full blocks are never written.
"""

from engine.messages import RequestId


class HeldBack:
    """Followers that wait for their leader, in order of arrival."""

    def __init__(self) -> None:
        self._leaders: dict[RequestId, RequestId] = {}
        self._followers: dict[RequestId, list[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._leaders

    def hold(self, request_id: RequestId, leader: RequestId) -> None:
        """Holds a follower back."""
        self._leaders[request_id] = leader
        self._followers.setdefault(leader, []).append(request_id)

    def discard(self, request_id: RequestId) -> None:
        """Forgets a follower, if it is held."""
        leader = self._leaders.pop(request_id, None)
        if leader is None:
            return
        self._followers[leader].remove(request_id)
        if not self._followers[leader]:
            del self._followers[leader]

    def release(self, leader: RequestId) -> list[RequestId]:
        """The followers of this leader, which are held no longer."""
        followers = self._followers.pop(leader, [])
        for request_id in followers:
            del self._leaders[request_id]
        return followers

    def validate(self) -> None:
        """Asserts that both directions say the same."""
        pairs = {(f, leader) for leader, fs in self._followers.items() for f in fs}
        assert pairs == set(self._leaders.items())
        assert all(self._followers.values())
