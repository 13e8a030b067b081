"""Builds a service from its encoded spec."""

import msgspec

from deploy.services.gateway import GatewayService
from deploy.services.spec import GatewaySpec, WorkerSpec
from deploy.services.thread import LoopService
from deploy.services.worker import WorkerService


def service_of(
    kind: str, spec: bytes, *, host: str | None = None
) -> tuple[LoopService[object], str]:
    """Returns the service of an encoded spec, and its log level.

    `host` is this node's address in its cluster; None outside of a cluster.
    """
    if kind == "worker":
        worker = msgspec.json.decode(spec, type=WorkerSpec)
        if host is not None:
            worker = msgspec.structs.replace(worker, host=host)
        return WorkerService(worker), worker.log_level
    gateway = msgspec.json.decode(spec, type=GatewaySpec)
    if host is not None:
        gateway = msgspec.structs.replace(gateway, control_host=host)
    return GatewayService(gateway), gateway.log_level
