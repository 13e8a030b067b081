"""Explains in plain English why a service could not start: no space, no permission, a signal.

Pure: no I/O. An operator reads these sentences in `baton pools`, `baton events`, /ready and the
dashboard.
"""

import errno
import signal

_OF_ERRNO = {
    errno.ENOSPC: "no space is left on the disk of {where}: free some, or use another folder",
    errno.EDQUOT: "the quota on the disk of {where} is used up: free some, or use another folder",
    errno.EROFS: "{where} is on a disk that is mounted read-only",
    errno.EACCES: "{where} may not be read or written by this user: change its owner or its mode",
    errno.EPERM: "{where} may not be read or written by this user: change its owner or its mode",
    errno.EFBIG: "{where} would be larger than files may be: raise the limit (ulimit -f)",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
    errno.ENOMEM: "no memory is left: use less KV memory (worker.kv_mib) or fewer workers",
    errno.EIO: "the disk of {where} does not work: input/output error",
    errno.ENODEV: "{where} is on a device that is gone",
}
_OF_SIGNAL = {
    signal.SIGBUS: "no room is left in shared memory, or on the disk of a file that it maps",
    signal.SIGILL: "its code was built for another processor",
    signal.SIGXFSZ: "a file would be larger than files may be (ulimit -f)",
}


def explain(error: BaseException) -> str:
    """Returns the reason of an error for an operator.

    An error that is not in the table keeps its own text.
    """
    if isinstance(error, MemoryError):
        return _OF_ERRNO[errno.ENOMEM]
    if not isinstance(error, OSError) or error.errno not in _OF_ERRNO:
        return str(error) or repr(error)
    where = " and ".join(str(each) for each in (error.filename, error.filename2) if each)
    sentence = _OF_ERRNO[error.errno].format(where=where or "a file that it needs")
    return f"{sentence} ({error.strerror})"


def explain_status(status: int | str) -> str:
    """Returns an exit status as text, with its meaning if the meaning helps an operator."""
    name = next((number for number in _OF_SIGNAL if status == -number), None)
    return f"exit status {status}" if name is None else f"exit status {status}: {_OF_SIGNAL[name]}"
