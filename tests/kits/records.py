"""Random KV records."""

import numpy as np

from kvtransfer.records import RecordPiece

RECORD_BYTES = 4096


def random_records(num_records, record_bytes=RECORD_BYTES, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_records, record_bytes), dtype=np.uint8)


def whole(num_bytes=RECORD_BYTES):
    return [RecordPiece(0, 0, num_bytes)]
