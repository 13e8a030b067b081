"""Builds a service from its encoded spec. Each kind is imported only where it is needed."""

import importlib

import msgspec

from deploy.base.run_dir import log_folder
from deploy.base.spec import GatewaySpec, StoreSpec, WorkerSpec
from deploy.base.thread import LoopService
from deploy.logs.lines import LogSource


def import_service(kind: str) -> None:
    """Imports the modules of a kind of service: "worker", "gateway" or "store"."""
    importlib.import_module(f"deploy.services.{kind}")


def service_of(
    kind: str, spec: bytes, *, host: str | None = None, node: str = ""
) -> tuple[LoopService[object], LogSource]:
    """Returns the service of an encoded spec, and the source of its log lines.

    `host` is this node's address in its cluster; None outside of a cluster. `node` is its name.
    """
    if kind == "worker":
        from deploy.services.worker import WorkerService

        worker = msgspec.json.decode(spec, type=WorkerSpec)
        if host is not None:
            worker = msgspec.structs.replace(worker, host=host)
        folder = log_folder(worker.log_folder, node)
        return WorkerService(worker), LogSource(worker.worker_id, worker.logs, folder)
    if kind == "store":
        from deploy.services.store import StoreService

        store = msgspec.json.decode(spec, type=StoreSpec)
        if host is not None:
            store = msgspec.structs.replace(store, host=host)
        # Its process keeps the lines; the parent's lines are few.
        return StoreService(store, node), LogSource(store.name, store.logs, None)
    from deploy.services.gateway import GatewayService

    gateway = msgspec.json.decode(spec, type=GatewaySpec)
    if host is not None:
        gateway = msgspec.structs.replace(gateway, control_host=host)
    folder = log_folder(gateway.log_folder, node)
    return GatewayService(gateway), LogSource(gateway.name, gateway.logs, folder)
