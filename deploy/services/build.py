"""Builds a service from its spec. Only the modules of the needed kind of service are imported."""

import importlib

import msgspec

from deploy.base.run_dir import log_folder
from deploy.base.spec import ServiceSpec, StoreSpec, WorkerSpec
from deploy.base.thread import LoopService
from deploy.logs.lines import LogSource


def import_service(kind: str) -> None:
    """Imports the modules of a kind of service: "worker", "gateway" or "store"."""
    importlib.import_module(f"deploy.services.{kind}")


def service_of(spec: ServiceSpec, node: str = "") -> tuple[LoopService[object], LogSource]:
    """Returns the service of a spec, and the source of its log lines.

    `node` is the service's node in a cluster.
    """
    source = LogSource(spec.name, spec.logs, log_folder(spec.log_folder, node))
    if isinstance(spec, WorkerSpec):
        from deploy.services.worker import WorkerService

        return WorkerService(spec), source
    if isinstance(spec, StoreSpec):
        from deploy.services.store import StoreService

        # The store's process writes lines to the folder; its keeper, which runs here, writes few.
        return StoreService(spec, node), msgspec.structs.replace(source, folder=None)
    from deploy.services.gateway import GatewayService

    return GatewayService(spec), source
