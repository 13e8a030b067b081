"""Finds the blocks on disk at a start, in one scan of the table of headers.

Payloads are not read here. A payload is verified each time it is read.
"""

from collections import Counter

import numpy as np

from kvtransfer.store.disk.format import (
    HEADER,
    Checksums,
    DiskGeometry,
    HeaderVerdict,
    RecoveredBlocks,
    claimed,
    judge,
    merged,
)
from kvtransfer.store.disk.slabs import SlabFiles

NO_BLOCKS = claimed(np.empty(0, HEADER))


def recover(
    files: SlabFiles, geometry: DiskGeometry, checksums: Checksums
) -> tuple[RecoveredBlocks, Counter[str]]:
    """Returns the blocks on disk, and the number of skipped entries by reason.

    Raises OSError if the table cannot be read.
    """
    pieces, verdicts = [NO_BLOCKS], np.zeros(len(HeaderVerdict), np.int64)
    for first_slot, headers in files.headers():
        found = judge(headers, first_slot, geometry, checksums)
        pieces.append(claimed(headers[found == HeaderVerdict.FINE]))
        verdicts += np.bincount(found, minlength=len(HeaderVerdict))
    blocks = merged(pieces)
    verdicts[HeaderVerdict.DUPLICATE] = verdicts[HeaderVerdict.FINE] - len(blocks)
    skipped = Counter({verdict.name.lower(): int(verdicts[verdict]) for verdict in HeaderVerdict})
    del skipped["fine"], skipped["empty"]
    return blocks, +skipped
