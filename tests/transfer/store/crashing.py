"""A process that writes, removes and reads blocks until it is killed, and reports its operations.

`python -m tests.transfer.store.crashing DIRECTORY ENGINE SEED` prints a record before each
operation ("begin") and after its outcome ("end"). A record has the slot, and the hash of the block
that the slot then has, or zeros.
"""

import os
import random
import struct
import sys

from kvtransfer.store.disk.tier import DiskRead, DiskWrite
from tests.transfer.store.tiers import content_of, hash_of, opened, polled

RECORD = struct.Struct("<5sB16s")
NUM_SLOTS = 8
BLOCK_BYTES = 20_000
NOTHING = bytes(16)
OPTIONS = {"num_slots": NUM_SLOTS, "block_bytes": BLOCK_BYTES, "slab_bytes": 8 * 20_480}


def main() -> None:
    """Runs operations until the process is killed."""
    directory, engine, seed = sys.argv[1:]
    rng = random.Random(int(seed))
    with opened(directory, engine, **OPTIONS) as (tier, blocks):
        held = {slot: block_hash for block_hash, slot in blocks.slot_by_hash().items()}
        while True:
            slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
            new = {slot: hash_of(rng.randrange(1, 2**100)) for slot in slots}
            tell("begin", new)
            writes = [
                DiskWrite(slot, one, content_of(one, BLOCK_BYTES)) for slot, one in new.items()
            ]
            tier.write(writes, 0.0)
            assert {done.reason for done in polled(tier, len(writes))} == {None}
            held |= new
            tell("end  ", new)
            slot = rng.choice(list(held))
            tell("begin", {slot: NOTHING})
            tier.remove(slot, 0.0)
            row = content_of(NOTHING, BLOCK_BYTES)
            tier.read([DiskRead(slot, held[slot], row)], 0.0)
            polled(tier, 1)


def tell(what: str, by_slot: dict[int, bytes]) -> None:
    """Writes records at once to a pipe, which keeps them when the process is killed."""
    records = (RECORD.pack(what.encode(), slot, one) for slot, one in by_slot.items())
    os.write(1, b"".join(records))


if __name__ == "__main__":
    main()
