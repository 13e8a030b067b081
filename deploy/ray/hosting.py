"""Where the service of an actor runs: in the actor's process, or in a child of a nursery.

On a cluster each actor hosts its service. On one machine the launcher has a nursery, which imports
torch once while Ray starts. There the actor is a thin shell: it asks the nursery for the process,
and both end together:

    the child ends    the actor ends too, so that Ray reports it
    the actor ends    the child's standard input ends, and so does the child; the launcher, which
                      knows its process id, kills it if it does not
"""

import logging
import os
import threading
from typing import Any

import msgspec

from deploy.base.gpus import VISIBLE
from deploy.base.reasons import explain_status
from deploy.base.spec import ServiceReady, ServiceSpec, WorkerSpec
from deploy.local.nursery_port import DistantNursery
from deploy.local.service_process import ServiceProcess
from deploy.logs.lines import LogSource, configure_logging
from engine.clock import MonotonicClock

log = logging.getLogger(__name__)

ENDED = 70  # exit status of an actor whose child has ended


class HostingThread:
    """The service runs in a thread of this process."""

    def __init__(self, spec: ServiceSpec, *, host: str, node: str) -> None:
        from deploy.base.thread import ServiceThread
        from deploy.services.build import service_of  # not where a child hosts the service

        service, source = service_of(msgspec.structs.replace(spec, host=host), node)
        configure_logging(source, MonotonicClock())
        self._thread: ServiceThread[Any] = ServiceThread(service, spec.kind)

    def start(self, limit_s: float) -> ServiceReady:
        """Opens the service. Raises BatonError, OSError, MemoryError."""
        from deploy.base.thread import freeze_heap

        ready: ServiceReady = self._thread.open(limit_s)
        freeze_heap()
        return ready

    def stop(self) -> None:
        """Closes the service."""
        self._thread.close()

    def stop_draining(self) -> None:
        """Makes `stop` wait for nothing, even while it runs."""
        self._thread.stop_draining()


class HostingChild:
    """The service runs in a child of the nursery whose port is at `port`."""

    def __init__(self, spec: ServiceSpec, *, port: str) -> None:
        if isinstance(spec, WorkerSpec):
            # Ray has chosen the GPUs of this process. The nursery's environment names all.
            seen = os.environ.get(VISIBLE, "").split(",") if spec.num_gpus else ()
            spec = msgspec.structs.replace(spec, gpus=tuple(seen))
        configure_logging(LogSource(spec.name, spec.logs), MonotonicClock())
        self._process = ServiceProcess(spec, DistantNursery(port))
        self._stops_draining = threading.Event()
        self._is_stopping = False

    def start(self, limit_s: float) -> ServiceReady:
        """Starts the child, and watches it from then on."""
        ready = self._process.start()
        threading.Thread(target=self._watch, name="child", daemon=True).start()
        return ready

    def stop(self) -> None:
        """Stops the child."""
        self._is_stopping = True
        self._process.stop(self._stops_draining)

    def stop_draining(self) -> None:
        """Makes `stop` wait for nothing, even while it runs."""
        self._stops_draining.set()

    def _watch(self) -> None:
        """Ends this process when the child has ended without being asked to."""
        self._process.await_end()
        if not self._is_stopping:
            how = explain_status(self._process.exit_status)
            log.error("the process of %s ended: %s", self._process.name, how)
            os._exit(ENDED)
