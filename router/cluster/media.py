"""The media on which a store keeps blocks, and the names under which an index knows them.

A worker has its blocks in one pool, and its events name no medium. A store has blocks in memory, on
disk and as objects, and a block may be on several of these. An index of prefixes knows a store
under its own name for the blocks in memory, and under a further name for each lower medium.
"""

from engine.messages import WorkerId
from engine.worker.block_events import Medium

SEPARATOR = "|"  # never in a worker's own name: `router.service` refuses such a worker


def name_on(store_id: WorkerId, medium: str) -> WorkerId:
    """Returns the name under which an index knows a store's blocks on a medium."""
    return store_id if medium == Medium.HOST else WorkerId(f"{store_id}{SEPARATOR}{medium}")
