"""The reasons of failed starts are sentences that name a remedy."""

import errno
import os

import pytest

from deploy.base.reasons import explain, explain_status


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no space is left on the disk of /var/cache/m: free some"),
        (errno.EDQUOT, "the quota on the disk of /var/cache/m is used up"),
        (errno.EROFS, "/var/cache/m is on a disk that is mounted read-only"),
        (errno.EACCES, "/var/cache/m may not be read or written by this user"),
        (errno.EFBIG, "/var/cache/m would be larger than files may be"),
        (errno.ENOMEM, "no memory is left"),
    ],
)
def test_errors_of_the_system_name_the_file_and_what_to_do(number: int, said: str):
    reason = explain(OSError(number, os.strerror(number), "/var/cache/m"))
    assert reason.startswith(said)
    assert reason.endswith(f"({os.strerror(number)})")


def test_an_error_without_a_file_or_a_number_still_says_something():
    told = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert told.startswith("no space is left on the disk of a file that it needs")
    assert explain(OSError("odd")) == "odd"
    assert explain(MemoryError()).startswith("no memory is left")
    assert explain(RuntimeError()) == "RuntimeError()"


def test_only_signals_with_a_known_cause_are_explained():
    assert explain_status(3) == "exit status 3"
    assert explain_status("unknown") == "exit status unknown"
    assert explain_status(-9) == "exit status -9"
    assert "shared memory" in explain_status(-7)
