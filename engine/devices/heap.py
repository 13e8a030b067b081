"""Returns freed memory of this process to the operating system."""

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Returns freed heap memory to the system. Other threads may run meanwhile.

    Does nothing without glibc. Other C libraries keep less freed memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
