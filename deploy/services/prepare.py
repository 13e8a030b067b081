"""Builds the C++ libraries of this machine: `python -m deploy.services.prepare`.

Each service would build what it needs when it needs it, one library after another. Here all cores
build at once, the longest first. `baton serve` does this while services import what they need, and
a service that needs a library sooner waits for it. What cannot be built is reported, and Baton
serves without it.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor

from decode.native.ngrams import SOURCES as NGRAMS
from engine.errors import BuildError
from engine.layout import KVFormat
from engine.model.native.library import SOURCES as ENGINE
from engine.model.native.library import attention_sources
from engine.native_build import Sources, built_library, is_built
from kvtransfer.native.library import SOURCES as TRANSFER
from kvtransfer.store.disk.uring import SOURCES as DISK
from router.native.library import SOURCES as ROUTER
from router.text.native.library import SOURCES as TEXT

log = logging.getLogger(__name__)

SERVING = (ENGINE, ROUTER, TRANSFER, TEXT)  # what each deployment needs, the longest first
ATTENTION = {kv_format: attention_sources(kv_format) for kv_format in KVFormat}
STOP_S = 2.0  # for compilers to end
LIBRARIES = {sources.name: sources for sources in (*SERVING, *ATTENTION.values(), NGRAMS, DISK)}


def main(names: Sequence[str] = ()) -> int:
    """Builds these libraries, or all. Returns 0 also if one cannot be built: a machine may have no
    compiler.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so removes half of a library
    wanted = [LIBRARIES[name] for name in names or LIBRARIES]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        try:
            for failure in filter(None, threads.map(_failure, wanted)):
                log.warning("%s", failure)
        except SystemExit:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return 0


class Preparation:
    """A process that builds what serving needs and is not built yet."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, kv_formats: Set[KVFormat]) -> None:
        """Starts it if it is needed. Services report what cannot be built."""
        with contextlib.suppress(BuildError, OSError):
            wanted = [ENGINE, *(ATTENTION[each] for each in kv_formats), *SERVING[1:]]
            missing = [sources.name for sources in wanted if not is_built(sources)]
            if missing:
                command = [sys.executable, "-m", "deploy.services.prepare", *missing]
                self._process = subprocess.Popen(
                    command, stderr=subprocess.DEVNULL, start_new_session=True
                )

    @property
    def is_running(self) -> bool:
        """True while it builds."""
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Ends it and its compilers."""
        process = self._process
        if process is None or not self.is_running:
            return
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it had just started another compiler
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(sources: Sources) -> str:
    """Builds one library. Returns the reason if that fails, else nothing."""
    try:
        built_library(sources)
    except BuildError as error:
        return f"{sources.name}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
