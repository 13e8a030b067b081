"""Settings of files and batches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The bounds of files, and the share of the pools that batches may take."""

    max_file_bytes: int = 200 * 2**20
    max_tenant_bytes: int = 2 * 2**30  # of all files of one tenant, results too
    max_total_bytes: int = 16 * 2**30
    share: float = 0.0  # of the places in decode workers, while other requests run
    idle_s: float = 0.5  # after other requests, until batches take all places
