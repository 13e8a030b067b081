"""All that a controller is started with, and the specs of services that follow from it."""

from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from deploy.model_source import name_of
from deploy.pools.effects import StartWorker
from deploy.pools.formats import config_of
from deploy.services.spec import GatewayReady, GatewaySpec, WorkerSpec
from engine.config import Config
from engine.control import FIRST_VERSION, Members, Pools, Version


class ControllerPlan(msgspec.Struct, frozen=True):
    """All that a controller is started with. Its JSON starts a controller again."""

    model: str  # as `model_source` reads it
    config: Config
    pools: Pools  # at the first start; later starts use what the operator ordered
    token: str
    cores: int  # of the machine where workers run, for their threads
    siblings: str | None = None  # a directory, if several gateways share a port
    memory_bytes: int | None = None  # for workers, seen at the start; None: each worker looks
    log_level: str = "warning"

    @property
    def first_version(self) -> Version:
        """Returns the version that is served until an operator adds another one."""
        name = self.config.gateway.model_name or name_of(self.model)
        return Version(FIRST_VERSION, self.model, name, self.config.worker, self.pools)

    @property
    def gateways(self) -> list[str]:
        """Returns the names of the gateways."""
        num_processes = self.config.gateway.processes
        if num_processes == 1:
            return ["gateway"]
        return [f"gateway-{i}" for i in range(num_processes)]

    def worker_spec(self, wanted: StartWorker, num_workers: int) -> WorkerSpec:
        """Returns the spec of a worker; `num_workers` share the machine's cores and memory."""
        version = wanted.version
        config = config_of(wanted.role, version.worker)
        return WorkerSpec(
            worker_id=wanted.worker_id,
            role=wanted.role,
            model=version.model,
            config=config,
            token=self.token,
            threads=config.threads or max(1, self.cores // num_workers),
            memory_bytes=self.memory_bytes,
            num_workers=num_workers,
            log_level=self.log_level,
            version=version.name,
        )

    def gateway_spec(
        self, name: str, members: Members, others: Collection[GatewayReady]
    ) -> GatewaySpec:
        """Returns the spec of a gateway, which shares the ports of `others` if there are any."""
        gateway = self.config.gateway
        if others:
            other = next(iter(others))
            port = urlsplit(other.url).port
            gateway = msgspec.structs.replace(gateway, port=port, grpc_port=other.grpc_port)
        return GatewaySpec(
            members=members,
            gateway=gateway,
            router=self.config.router,
            token=self.token,
            log_level=self.log_level,
            name=name,
            process=self.gateways.index(name),
            joins=bool(others),
            siblings=self.siblings,
        )
