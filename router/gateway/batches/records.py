"""Files and batches as stored in the database, and their form in OpenAI's API. Pure.

    validating ──> in_progress ──> finalizing ──> completed
        │  │            │  │            └───────> expired
        │  └────────────┴──┼──> cancelling ─────> cancelled
        └──> failed        └──> finalizing, if the completion window ends

A batch that expired or was cancelled keeps its answers. Its unanswered requests are listed in the
error file.
"""

import re
from enum import StrEnum
from typing import Literal

import msgspec

from router.inbox.api_errors import invalid_value

MAX_WINDOW_S = 30 * 86_400
_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")


class FilePurpose(StrEnum):
    """The purpose of a file."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """The status of a batch in its life cycle."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_S = BatchStatus
NEXT: dict[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.IN_PROGRESS, _S.FAILED, _S.CANCELLING, _S.FINALIZING}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.CANCELLING}),
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.EXPIRED}),
    _S.CANCELLING: frozenset({_S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.COMPLETED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
ACTIVE = tuple(status for status, following in NEXT.items() if following)
CANCELLABLE = (_S.VALIDATING, _S.IN_PROGRESS)


class FileRecord(msgspec.Struct, frozen=True):
    """A file. Times are Unix time, in seconds."""

    id: str
    tenant: str  # the `owner` of a `router.access.limits.Tenant`
    purpose: str
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int | None

    def shown(self) -> "ShownFile":
        """Returns the file in the form of OpenAI's API."""
        return ShownFile(
            id=self.id,
            bytes=self.num_bytes,
            created_at=self.created_s,
            expires_at=self.expires_s,
            filename=self.filename,
            purpose=self.purpose,
        )


class LineFault(msgspec.Struct, frozen=True):
    """The fault of a line in an input file. Lines are counted from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch.

    Times are Unix time, in seconds; `ending` is the status after all output is written.
    """

    id: str
    tenant: str  # the `owner` of a `router.access.limits.Tenant`
    sharing: str  # the `sharing` of that tenant
    endpoint: str
    input_file_id: str
    window: str
    metadata: dict[str, str] | None
    output_expires_after_s: int | None
    status: BatchStatus = BatchStatus.VALIDATING
    ending: BatchStatus | None = None
    created_s: int
    expires_s: int
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    cancelling_s: int | None = None
    ended_s: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_read_bytes: int = 0  # bytes of the input file validated so far
    num_read_lines: int = 0  # lines validated so far, including blank lines
    num_written_lines: int = 0  # number of the last line written to the output files
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineFault] = []

    def shown(self) -> "ShownBatch":
        """Returns the batch in the form of OpenAI's API."""
        status, ended_s = self.status, self.ended_s
        return ShownBatch(
            id=self.id,
            endpoint=self.endpoint,
            errors=BatchFaults(self.errors) if self.errors else None,
            input_file_id=self.input_file_id,
            completion_window=self.window,
            status=status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_s,
            in_progress_at=self.in_progress_s,
            expires_at=self.expires_s,
            finalizing_at=self.finalizing_s,
            completed_at=ended_s if status is BatchStatus.COMPLETED else None,
            failed_at=ended_s if status is BatchStatus.FAILED else None,
            expired_at=ended_s if status is BatchStatus.EXPIRED else None,
            cancelling_at=self.cancelling_s,
            cancelled_at=ended_s if status is BatchStatus.CANCELLED else None,
            request_counts=BatchCounts(self.num_lines, self.num_completed, self.num_failed),
            metadata=self.metadata,
        )


class ShownFile(msgspec.Struct, kw_only=True):
    """A file. `bytes` is its length, times are Unix time in seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, kw_only=True):
    """Files."""

    object: Literal["list"] = "list"
    data: list[ShownFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchCounts(msgspec.Struct):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchFaults(msgspec.Struct):
    """What is wrong with a batch's input."""

    data: list[LineFault]
    object: Literal["list"] = "list"


class ShownBatch(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix time, in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """Batches."""

    object: Literal["list"] = "list"
    data: list[ShownBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def window_s(text: str) -> int:
    """Returns the seconds of a completion window such as `24h`. Raises ApiError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS_OF[found[2]] if found is not None else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        message = (
            f"completion_window is {text[:40]!r}; expected a number and s, m, h or d, "
            "as in '24h', at most 30 days"
        )
        raise invalid_value(message, "completion_window")
    return seconds
