"""The controller's sessions with all workers, gateways and stores."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping

from deploy.base.spec import BlockEventsAnswer, GatewayReady, StoreReady
from deploy.controller.links import (
    ANSWER_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    RETRY_EVERY_S,
    GatewayLink,
    StoreLink,
    WorkerLink,
    talk,
)
from deploy.controller.tasks import ControllerTasks, pause
from deploy.pools.events import GatewayHeard, GatewaySilent, Overtaken, PoolEvent
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import OrderRefused
from engine.clock import Clock
from engine.control import (
    ClusterReport,
    ControllerReport,
    GatewayReport,
    Members,
    RequestInfo,
    StoreReport,
    TierReport,
)
from engine.messages import GatewayId, Role, Welcome, WorkerId
from engine.net.curve import Channel, client_keys, server_keys
from engine.net.trust import Secret


class PoolSessions:
    """Dials workers, gateways and stores, and turns their messages into events.

    Before `attach`, the sessions only query the members that gateways know.
    """

    def __init__(
        self,
        secret: Secret,
        *,
        clock: Clock,
        tasks: ControllerTasks,
        handle: Callable[[PoolEvent], None],
    ) -> None:
        self.links: dict[WorkerId, WorkerLink] = {}
        self.gateway_links: dict[str, GatewayLink] = {}
        self.store_links: dict[str, StoreLink] = {}
        self._controller_id = GatewayId(f"controller-{secrets.token_hex(6)}")
        self._secret = secret
        self._clock = clock
        self._tasks = tasks
        self._handle = handle
        self._machine: PoolMachine | None = None
        self._dialling: dict[str, asyncio.Task[None]] = {}  # by service: the task that dials it
        self._cluster: ClusterReport | None = None  # the latest report that was sent
        self._informed: set[str] = set()  # gateways that have received `_cluster`

    async def adopt(self, gateways: Mapping[str, GatewayReady]) -> Members | None:
        """Dials the gateways that already run. Returns the newest members that a gateway knows."""
        waits: list[asyncio.Task[object]] = []
        for name, ready in gateways.items():
            heard = asyncio.Event()
            self.dial_gateway(name, ready, on_welcome=heard.set)
            waits.append(asyncio.create_task(heard.wait()))
        if waits:
            _, late = await asyncio.wait(waits, timeout=HANDSHAKE_TIMEOUT_S)
            for task in late:
                task.cancel()
        heard_of = [link.heard for link in self.gateway_links.values() if link.heard is not None]
        members = [welcome.members for welcome in heard_of if welcome.members is not None]
        return max(members, key=lambda each: each.version, default=None)

    def attach(self, machine: PoolMachine) -> None:
        """Connects the gateways to the machine.

        From now on the machine gets events of gateways, and gateways get the machine's members.
        """
        self._machine = machine

    def dial_worker(self, worker_id: WorkerId, address: str) -> None:
        """Opens a session with a worker. Reopens the session when it ends, until `hang_up`."""
        link = WorkerLink(
            worker_id, address, controller_id=self._controller_id, on_event=self._handle
        )
        self.links[worker_id] = link
        self._dial(worker_id, address, link)

    def dial_gateway(
        self, name: str, ready: GatewayReady, on_welcome: Callable[[], None] | None = None
    ) -> None:
        """Opens a session with a gateway. Reopens the session when it ends, until `hang_up`."""
        link = GatewayLink(
            name,
            clock=self._clock,
            on_welcome=lambda: self._on_welcome(name, on_welcome),
            on_event=self._on_gateway_event,
        )
        self.gateway_links[name] = link
        self._dial(name, ready.control, link)

    def dial_store(self, name: str, ready: StoreReady) -> None:
        """Opens a session with a store. Reopens the session when it ends, until `hang_up`."""
        link = StoreLink(name, clock=self._clock, members=self._present_members)
        self.store_links[name] = link
        self._dial(name, ready.control, link)

    def _present_members(self) -> Members | None:
        return None if self._machine is None else self._machine.members

    def hang_up(self, name: str) -> None:
        """Ends the session with a service that has been stopped."""
        self._cancel(name)
        self.links.pop(WorkerId(name), None)
        self.gateway_links.pop(name, None)
        self.store_links.pop(name, None)

    # ------------------------------------------------------------ to workers and gateways

    def set_role(self, worker_id: WorkerId, role: Role) -> None:
        """Sends a role to a worker.

        Without a session nothing is sent, and the machine repeats the role later.
        """
        if (link := self.links.get(worker_id)) is not None:
            link.set_role(role)

    def publish(self, members: Members) -> None:
        """Sends the members to all gateways and stores."""
        for gateway in self.gateway_links.values():
            gateway.send(members)
        for store in self.store_links.values():
            store.send(members)

    def send_reports(self, report: ControllerReport, cluster: ClusterReport) -> None:
        """Sends `report` to all gateways. Sends `cluster` to gateways that have not received it
        yet.
        """
        is_new, self._cluster = cluster != self._cluster, cluster
        informed = set() if is_new else self._informed
        for name, gateway in self.gateway_links.items():
            gateway.send(report)
            if name not in informed:
                gateway.send(cluster)
        self._informed = {name for name, link in self.gateway_links.items() if link.is_open}

    # ------------------------------------------------------------ from workers and gateways

    def reports(self, names: Iterable[str]) -> list[GatewayReport | None]:
        """Returns the fresh report of each gateway; None for a gateway without a fresh report."""
        links = (self.gateway_links.get(name) for name in names)
        return [None if link is None else link.fresh_report for link in links]

    def store_troubles(self) -> dict[str, tuple[str, ...]]:
        """Returns the troubles of the tiers of each store.

        Stores without a fresh report are left out.
        """
        return {
            name: tuple(_trouble(tier) for tier in report.tiers if tier.fault or tier.shortage)
            for name, report in self.store_reports().items()
            if report is not None
        }

    def store_reports(self) -> dict[str, StoreReport | None]:
        """Returns the fresh report of each store; None for a store without a fresh report."""
        return {name: link.fresh_report for name, link in self.store_links.items()}

    def infos(self) -> dict[WorkerId, Welcome]:
        """Returns the `Welcome` message of each worker that has sent one."""
        return {name: link.info for name, link in self.links.items() if link.info is not None}

    async def requests(self) -> tuple[int, list[tuple[str, RequestInfo]]]:
        """Returns the number of requests in service, and the oldest requests of each gateway.

        Raises OrderRefused if a gateway does not answer in time.
        """
        links = dict(self.gateway_links)
        lists = await asyncio.gather(*(link.requests() for link in links.values()))
        answered = [
            (name, each) for name, each in zip(links, lists, strict=True) if each is not None
        ]
        if len(answered) < len(links):
            silent = ", ".join(sorted(set(links) - {name for name, _ in answered}))
            raise OrderRefused(f"no answer in {ANSWER_TIMEOUT_S:g} s from {silent}", status=503)
        found = [(name, info) for name, each in answered for info in each.requests]
        return sum(each.num_requests for _, each in answered), found

    def block_events(self) -> BlockEventsAnswer:
        """Returns the addresses of workers' block events, and the keys for a subscriber."""
        mine = client_keys(self._secret, Channel.BLOCK_EVENTS)
        return BlockEventsAnswer(
            curve_serverkey=server_keys(self._secret, Channel.BLOCK_EVENTS).public.decode(),
            curve_publickey=mine.public.decode(),
            curve_secretkey=mine.secret.decode(),
            workers={name: info.events for name, info in self.infos().items() if info.events},
        )

    # ------------------------------------------------------------ links

    def _on_welcome(self, name: str, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        if self._machine is None:
            return
        link, members = self.gateway_links[name], self._machine.members
        known = None if link.heard is None else link.heard.members
        counts = known is not None and (known.version >= members.version or self._machine.is_guess)
        if known is not None and counts and known != members:
            self._handle(Overtaken(known))  # the machine then publishes to all gateways
        else:
            link.welcome(members)
        self._handle(GatewayHeard(name))  # last: after this event the intent counts as certain

    def _on_gateway_event(self, event: PoolEvent) -> None:
        """Passes an event to the machine.

        The end of a session by `hang_up` is not passed on as a lost session.
        """
        is_hung_up = isinstance(event, GatewaySilent) and event.name not in self.gateway_links
        if self._machine is not None and not is_hung_up:
            self._handle(event)

    def _dial(self, name: str, address: str, link: WorkerLink | GatewayLink | StoreLink) -> None:
        self._cancel(name)
        self._dialling[name] = self._tasks.spawn(self._keep(address, link))

    def _cancel(self, name: str) -> None:
        if (task := self._dialling.pop(name, None)) is not None:
            task.cancel()

    async def _keep(self, address: str, link: WorkerLink | GatewayLink | StoreLink) -> None:
        """Redials after each end of the session, and after a bug in this code.

        Without a session after the bug, a healthy worker would be stopped.
        """
        while True:
            try:
                await talk(address, self._secret, link)
            except Exception as error:
                self._tasks.record_bug(error)
            await pause(RETRY_EVERY_S)


def _trouble(tier: TierReport) -> str:
    if tier.fault is not None:
        return f"its {tier.medium} tier is not used: {tier.fault}"
    return f"its {tier.medium} tier is too small: {tier.shortage}"
