"""The media on which a store keeps blocks, and the names under which an index knows them.

A worker has its blocks in one pool, and its events name no medium. A store has them in memory, on
disk and as objects, and a block may be on several of these. An index of prefixes knows a store by
its own name for what is in memory, and by a name for each lower medium.
"""

from engine.messages import WorkerId
from engine.worker.block_events import Medium

SEPARATOR = "|"  # in no worker's own name: `router.service` refuses such a worker


def name_on(store_id: WorkerId, medium: str) -> WorkerId:
    """Returns the name under which an index knows what a store holds on a medium."""
    return store_id if medium == Medium.HOST else WorkerId(f"{store_id}{SEPARATOR}{medium}")
