"""Builds all C++ libraries of this machine: `python -m deploy.services.prepare`.

A first start would build them one after another while clients wait. Here each has a compiler of its
own. What cannot be built is reported, and Baton serves without it.
"""

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

from engine.errors import BuildError
from engine.model.native.library import SOURCES as ENGINE
from engine.native_build import Sources, built_library
from kvtransfer.native.library import SOURCES as TRANSFER
from kvtransfer.store.disk.uring import SOURCES as DISK
from router.native.library import SOURCES as ROUTER

log = logging.getLogger(__name__)

LIBRARIES = (ENGINE, ROUTER, TRANSFER, DISK)  # the longest first


def main() -> int:
    """Returns 0 also if a library cannot be built: a machine may have no compiler."""
    with ThreadPoolExecutor(len(LIBRARIES)) as threads:
        for failure in filter(None, threads.map(_failure, LIBRARIES)):
            log.warning("%s", failure)
    return 0


def _failure(sources: Sources) -> str:
    """Builds one library. Returns the reason if that fails, else nothing."""
    try:
        built_library(sources)
    except BuildError as error:
        return f"{sources.name}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
