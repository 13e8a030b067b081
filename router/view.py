"""The cluster as one gateway sees it: live workers, and what this gateway has promised to each.

Reservations are debits on predicted capacity, made when a request is placed and credited back when
its claim ends. They are exact for what this gateway sends, whatever the workers last reported.
"""

from dataclasses import dataclass, field

from engine.messages import LoadReport, SeqId, Welcome, WorkerId


@dataclass(slots=True)
class WorkerView:
    """A live worker and the claims on it, by sequence."""

    info: Welcome
    load: LoadReport | None = None
    reported_s: float = 0.0  # when `load` came
    prefill_tokens: dict[SeqId, int] = field(default_factory=dict)
    decode_blocks: dict[SeqId, int] = field(default_factory=dict)
    reserved_tokens: int = 0
    reserved_blocks: int = 0

    def reserve_prefill(self, seq_id: SeqId, num_tokens: int) -> None:
        """Debits a prompt that is to be computed there."""
        assert seq_id not in self.prefill_tokens
        self.prefill_tokens[seq_id] = num_tokens
        self.reserved_tokens += num_tokens

    def release_prefill(self, seq_id: SeqId) -> None:
        """Credits it back, if it was not yet."""
        self.reserved_tokens -= self.prefill_tokens.pop(seq_id, 0)

    def reserve_decode(self, seq_id: SeqId, num_blocks: int) -> None:
        """Debits the KV of a sequence at its greatest length."""
        assert seq_id not in self.decode_blocks
        self.decode_blocks[seq_id] = num_blocks
        self.reserved_blocks += num_blocks

    def release_decode(self, seq_id: SeqId) -> None:
        """Credits it back, if it was not yet."""
        self.reserved_blocks -= self.decode_blocks.pop(seq_id, 0)


@dataclass(slots=True)
class ClusterView:
    """All live workers; only the router machine changes it.

    `severed` are pairs of a source and a sink between which KV lately did not arrive though both
    live, each with the time at which it will be tried again.
    """

    workers: dict[WorkerId, WorkerView] = field(default_factory=dict)
    severed: dict[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)

    def forget_severed(self, now_s: float) -> None:
        """Lets pairs be tried again whose time has come."""
        if self.severed:
            self.severed = {pair: at_s for pair, at_s in self.severed.items() if at_s > now_s}

    def validate(self) -> None:
        """Asserts that every sum is the sum of its parts."""
        for worker in self.workers.values():
            assert worker.reserved_tokens == sum(worker.prefill_tokens.values())
            assert worker.reserved_blocks == sum(worker.decode_blocks.values())
