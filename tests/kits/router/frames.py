"""Finds stack frames that only the garbage collector would free."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def no_frames_in_cycles() -> Iterator[None]:
    """Fails if the code in the block leaves product frames in reference cycles."""
    gc.freeze()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {_name(each) for each in gc.garbage if isinstance(each, FrameType)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert not left, sorted(left)


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
