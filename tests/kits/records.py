"""Random KV records, and a switch between the C++ and the numpy copies."""

from contextlib import contextmanager

import numpy as np
import pytest

from kvtransfer.native import copying, library
from kvtransfer.records import RecordPiece

COPIES = ["native", "numpy"]
RECORD_BYTES = 4096


@contextmanager
def copied_by(name):
    """Lets C++ make the copies, or numpy as if C++ could not be built."""
    assert library.is_native(), "these tests compare two implementations"
    with pytest.MonkeyPatch.context() as patch:
        if name == "numpy":
            patch.setattr(copying, "kernels", lambda: None)
        yield


def random_records(num_records, record_bytes=RECORD_BYTES, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_records, record_bytes), dtype=np.uint8)


def whole(num_bytes=RECORD_BYTES):
    return [RecordPiece(0, 0, num_bytes)]
