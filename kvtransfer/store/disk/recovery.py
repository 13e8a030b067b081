"""What is on disk after a start: one scan of the table of headers.

Payloads are not read here. They are verified whenever they are read.
"""

from collections import Counter

import numpy as np

from kvtransfer.store.disk.format import (
    HEADER,
    Checksums,
    DiskGeometry,
    RecoveredBlocks,
    Verdict,
    judge,
    recovered,
)
from kvtransfer.store.disk.slabs import SlabFiles


def recover(
    files: SlabFiles, geometry: DiskGeometry, checksums: Checksums
) -> tuple[RecoveredBlocks, Counter[str]]:
    """Returns the blocks on disk, and how many entries were skipped for which reason.

    Raises OSError if the table cannot be read.
    """
    fine, verdicts = [np.empty(0, HEADER)], np.zeros(len(Verdict), np.int64)
    for first_slot, headers in files.headers():
        found = judge(headers, first_slot, geometry, checksums)
        fine.append(headers[found == Verdict.FINE])
        verdicts += np.bincount(found, minlength=len(Verdict))
    blocks, verdicts[Verdict.DUPLICATE] = recovered(np.concatenate(fine))
    skipped = Counter({verdict.name.lower(): int(verdicts[verdict]) for verdict in Verdict})
    del skipped["fine"], skipped["empty"]
    return blocks, +skipped
