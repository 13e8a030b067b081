"""Checksums of headers, computed one by one, with which the C++ checksums are compared."""

import numpy as np
import numpy.typing as npt

from kvtransfer.store.disk.format import HEADER, HEADER_BYTES, Headers, disk_checksum


def slow_header_checksums(headers: Headers) -> npt.NDArray[np.uint64]:
    """Returns the expected checksum of each header."""
    entries, (_, length) = memoryview(headers.tobytes()), HEADER.fields["checksum"]
    starts = range(0, len(entries), HEADER_BYTES)
    found = (disk_checksum(entries[at : at + length]) for at in starts)
    return np.fromiter(found, np.uint64, len(headers))
