"""Terms of both ends of the lease protocol: deadlines and reasons for an end."""

from dataclasses import dataclass

RELEASED = "released"
LOST_WHILE_WAITING = "lease was lost while waiting"  # why a pull fails that ended before its start
END_REASONS = {  # a source may give these; each names a counter at the sink
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

    ttl_s: float = 30.0  # a lease without a message from its sink ends
    early_s: float = 1.0  # a rank that does not know a lease yet answers after so long
    hold_every_s: float = 1.0  # a sink renews its leases at this interval
    reread_s: float = 2.0  # if the source sends no block for so long, the sink asks again
    silence_s: float = 6.0  # if a question stays unanswered for so long, the source counts as dead
