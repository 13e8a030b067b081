"""Loads weights straight to a device.

Without a device map, transformers loads all weights into host memory, from where they would be
copied. With one, it brings each tensor to the device as it is read. It then asks for the package
accelerate, which it needs for maps of several devices only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.integrations import accelerate


@contextmanager
def one_device_maps() -> Iterator[None]:
    """Returns a context in which `from_pretrained` accepts a map of one device without
    accelerate.
    """
    is_available = accelerate.is_accelerate_available
    accelerate.is_accelerate_available = lambda *_: True
    try:
        yield
    finally:
        accelerate.is_accelerate_available = is_available
