"""The parameters of a controller's start, and the specs of services that are made from them."""

from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from deploy.base.spec import GatewayReady, GatewaySpec, StoreSpec, WorkerSpec
from deploy.model_source import name_of
from deploy.pools.events import StartStore, StartWorker
from deploy.pools.formats import config_of, stretch_of
from engine.config import Config, DeviceKind, GatewayConfig, WorkerConfig
from engine.control import FIRST_VERSION, SERVING_ROLES, Intent, Members, Pools, Version
from engine.devices.settings import choose_device, gpus_of_worker
from engine.messages import Role

CORES_FOR_TWO_GATEWAYS = 4  # with fewer cores, a second gateway would slow down the workers
STORE = "store.sqlite"  # name of a file beside the directory of siblings


def gateway_processes(gateway: GatewayConfig, cores: int) -> int:
    """Returns the number of gateways on a machine: as configured, or by the number of cores."""
    if gateway.processes is not None:
        return gateway.processes
    return 1 if cores < CORES_FOR_TWO_GATEWAYS else 2


class ControllerPlan(msgspec.Struct, frozen=True):
    """The parameters of a controller's start.

    The next controller is started from the plan's JSON.
    """

    model: str  # in a form that `model_source` reads
    config: Config
    pools: Pools  # pools at the first start; later starts use the operator's orders
    token: str
    cores: int  # number of cores that workers of one machine share
    siblings: str | None = None  # a directory, if several gateways share a port
    ports: str | None = None  # a directory where gateways get listening sockets from each other
    log_folder: str | None = None  # folder of log lines, as in `WorkerSpec`
    # Memory of all workers, measured once; None: each worker measures.
    memory_bytes: int | None = None
    others: tuple[Version, ...] = ()  # the first versions of all models but the main one
    has_gpus: bool = False  # True if workers start on machines with GPUs
    salts: str | None = None  # the secret of tenants' salts; None: the token is used

    @property
    def first_versions(self) -> tuple[Version, ...]:
        """Returns for each model its first version, which is served until an operator adds another
        version.
        """
        name = self.config.gateway.model_name or name_of(self.model)
        worker = self.config.worker
        main = Version(
            FIRST_VERSION, self.model, name, worker, self.pools, device=self.device_of(worker)
        )
        return (main, *self.others)

    def device_of(self, worker: WorkerConfig) -> DeviceKind:
        """Returns the kind of device on which workers with this configuration run.

        Raises ConfigError.
        """
        return choose_device(worker.device, self.config.pools, has_gpus=self.has_gpus)

    @property
    def num_gpus(self) -> float:
        """Returns the number of GPUs of each worker. The number is the same for all versions."""
        pools = self.config.pools
        return max(
            gpus_of_worker(pools, version.device, config.tp * config.pp)
            for version in self.first_versions
            for role in SERVING_ROLES
            for config in [config_of(role, version.worker, version.device)]
        )

    def under(self, intent: Intent) -> "ControllerPlan":
        """Returns the plan in which settings have the values that operators have ordered later."""
        if (live := intent.live) is None:
            return self
        config = msgspec.structs.replace(
            self.config, pools=live.pools, update=live.update, planner=live.planner
        )
        return msgspec.structs.replace(self, config=config)

    @property
    def gateways(self) -> list[str]:
        """Returns the names of the gateways."""
        num_processes = self.config.gateway.processes or 1
        if num_processes == 1:
            return ["gateway"]
        return [f"gateway-{i}" for i in range(num_processes)]

    def worker_spec(self, wanted: StartWorker, num_workers: int) -> WorkerSpec:
        """Returns the spec of a worker; `num_workers` share the machine's cores.

        Spares need memory for KV, like decode workers, but no cores.
        """
        version = wanted.version
        role = Role.DECODE if wanted.role is Role.DRAINED else wanted.role
        config = msgspec.structs.replace(
            config_of(role, version.worker, version.device),
            stretch=stretch_of(version.worker, version.device, self.config.pools),
        )
        return WorkerSpec(
            worker_id=wanted.worker_id,
            role=wanted.role,
            model=version.model,
            config=config,
            token=self.token,
            threads=config.threads or max(1, self.cores // (num_workers * config.tp * config.pp)),
            memory_bytes=self.memory_bytes,
            num_workers=num_workers + self.config.pools.spares,
            kept_bytes=self.config.store.memory_mib * 2**20,
            logs=msgspec.structs.replace(self.config.logs, access=None, audit=None),
            log_folder=self.log_folder,
            version=version.name,
            num_gpus=gpus_of_worker(self.config.pools, version.device, config.tp * config.pp),
        )

    def store_spec(self, wanted: StartStore, members: Members) -> StoreSpec:
        """Returns the spec of a store of one version on one node."""
        return StoreSpec(
            name=wanted.name,
            members=members,
            config=self.config.store,
            token=self.token,
            version=wanted.version.name,
            transport=wanted.version.worker.kv_transport,
            node=wanted.node,
            logs=msgspec.structs.replace(self.config.logs, access=None, audit=None),
            log_folder=self.log_folder,
        )

    def gateway_spec(
        self, name: str, members: Members, others: Collection[GatewayReady]
    ) -> GatewaySpec:
        """Returns the spec of a gateway. If there are `others`, the gateway shares their ports."""
        gateway = self.config.gateway
        if gateway.store is None and self.siblings is not None:  # else each has its own
            store = Path(self.siblings).with_name(STORE)
            gateway = msgspec.structs.replace(gateway, store=str(store))
        if others:
            other = next(iter(others))
            port = urlsplit(other.url).port
            gateway = msgspec.structs.replace(gateway, port=port, grpc_port=other.grpc_port)
        return GatewaySpec(
            members=members,
            gateway=gateway,
            router=self.config.router,
            token=self.token,
            logs=msgspec.structs.replace(self.config.logs, audit=None),
            log_folder=self.log_folder,
            name=name,
            process=self.gateways.index(name),
            siblings=self.siblings,
            ports=self.ports,
            salts=self.salts,
        )
