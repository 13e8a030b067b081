"""Hosts the service of an actor: in the actor's process, or in a child of a nursery.

On a cluster each actor's process runs its service. On a single machine the launcher has a nursery,
which imports torch only once, while Ray starts. There the actor requests a child from the nursery,
and the child runs the service. Actor and child end together:

    the child ends    the actor ends too, so that Ray reports the end
    the actor ends    the child's standard input ends, so the child ends. If the child does not end,
                      the launcher kills it by its process id
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
    """Runs the service in a thread of this process."""

    def __init__(self, spec: ServiceSpec, *, host: str, node: str) -> None:
        from deploy.base.thread import ServiceThread

        # Imported here, because this is not needed if a child runs the service.
        from deploy.services.build import service_of

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
        """Makes `stop` stop waiting for answers, even if `stop` is already running."""
        self._thread.stop_draining()


class HostingChild:
    """Runs the service in a child of the nursery whose port is the socket `port`."""

    def __init__(self, spec: ServiceSpec, *, port: str) -> None:
        if isinstance(spec, WorkerSpec):
            # Ray has limited this process to the GPUs of the worker. The nursery's environment has
            # all GPUs.
            seen = os.environ.get(VISIBLE, "").split(",") if spec.num_gpus else ()
            spec = msgspec.structs.replace(spec, gpus=tuple(seen))
        configure_logging(LogSource(spec.name, spec.logs), MonotonicClock())
        self._process = ServiceProcess(spec, DistantNursery(port))
        self._stops_draining = threading.Event()
        self._is_stopping = False

    def start(self, limit_s: float) -> ServiceReady:
        """Starts the child, and from then on watches for the child's end."""
        ready = self._process.start()
        threading.Thread(target=self._watch, name="child", daemon=True).start()
        return ready

    def stop(self) -> None:
        """Stops the child."""
        self._is_stopping = True
        self._process.stop(self._stops_draining)

    def stop_draining(self) -> None:
        """Makes `stop` stop waiting for answers, even if `stop` is already running."""
        self._stops_draining.set()

    def _watch(self) -> None:
        """Ends this process if the child ends without having been stopped."""
        self._process.await_end()
        if not self._is_stopping:
            how = explain_status(self._process.exit_status)
            log.error("the process of %s ended: %s", self._process.name, how)
            os._exit(ENDED)
