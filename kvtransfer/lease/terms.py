"""Terms of both ends of the lease protocol: deadlines and reasons for an end."""

from dataclasses import dataclass

RELEASED = "released"
LOST_WHILE_WAITING = "lease was lost while waiting"  # the pull had not started yet
END_REASONS = {  # reasons that a source may give; each is a counter at the sink
    RELEASED,
    "revoked",
    "expired",
    "unknown",
    "held by another",
    "bad read",
    "bad message",
    "unread answers",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the protocol, seconds."""

    ttl_s: float = 30.0  # a lease ends after this time without a message from its sink
    early_s: float = 1.0  # a rank answers about an unknown lease after this time
    hold_every_s: float = 1.0  # a sink renews its leases at this interval
    reread_s: float = 2.0  # the sink asks again after this time without a block
    silence_s: float = 6.0  # the source counts as dead after this time without an answer
