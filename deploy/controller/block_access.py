"""What a subscriber to block events needs. The admin API answers with it."""

import msgspec

from engine.messages import EventsAddress, WorkerId


class BlockEventsAnswer(msgspec.Struct, frozen=True):
    """CURVE keys in Z85 and addresses for a subscriber to block events.

    Each worker has an address where it publishes and one where it answers
    (`engine.worker.block_events`). The keys open block events only. Each start of the deployment
    makes new keys.
    """

    curve_serverkey: str
    curve_publickey: str
    curve_secretkey: str
    workers: dict[WorkerId, EventsAddress]
