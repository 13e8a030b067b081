"""The pools from a gateway's view: wanted workers, serving workers, and the controller's reports.

The wanted sizes are part of the members, and a worker is serving if it has a session with this
gateway. So both counts are exported even while no controller runs. All other values of a report are
dropped after `STALE_S`, so that no old value looks new. Then `baton_controller_up` is 0.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from engine.clock import Clock
from engine.control import SERVING_ROLES, ClusterReport, ControllerReport, Members
from engine.messages import Role
from router.gateway.metrics.families import decode_metrics, gauge
from router.gateway.versions import Versions

log = logging.getLogger(__name__)

STALE_S = 5.0  # seconds; the controller sends a report once a second


class PoolCount(msgspec.Struct, frozen=True):
    """The workers of a version with one role.

    `wanted` is the ordered number, `serving` the number with a session at this gateway.
    """

    version: str
    role: Role
    wanted: int
    serving: int


class PoolBoard:
    """The latest members and report from the controller."""

    def __init__(self, versions: Versions, clock: Clock) -> None:
        self.members: Members | None = None
        self.cluster: ClusterReport | None = None  # the report that the dashboard shows
        self._versions = versions
        self._clock = clock
        self._news: ControllerReport | None = None
        self._heard_s = 0.0

    def take(self, news: ControllerReport) -> None:
        """Keeps a report of the controller. Its metrics are decoded when Prometheus scrapes."""
        self._news, self._heard_s = news, self._clock.now_s()

    @property
    def is_fresh(self) -> bool:
        """True if the latest report is at most `STALE_S` old."""
        return self._news is not None and self._clock.now_s() - self._heard_s <= STALE_S

    @property
    def troubles(self) -> tuple[str, ...]:
        """Sentences about broken or limited parts of the deployment, one sentence per part."""
        if self._news is not None and not self.is_fresh:
            return ("no controller reports: nothing is started again, and orders are refused",)
        return () if self.cluster is None else self.cluster.troubles

    @property
    def gateways(self) -> tuple[str, ...]:
        """The URLs of all gateways in the latest report; empty before the first report."""
        return () if self._news is None else self._news.gateways

    @property
    def pools(self) -> list[PoolCount] | None:
        """All known pools, including empty pools; None before the first members."""
        if self.members is None:
            return None
        ports = {each.name: each.port for each in self._versions.table}
        found = []
        for version in self.members.intent.versions:
            port = ports.get(version.name)
            roles = Counter(each.role for each in port.workers().values()) if port else Counter()
            for role in SERVING_ROLES:
                count = PoolCount(version.name, role, version.pools.of(role), roles[role])
                found.append(count)
        return found

    def families(self) -> Iterator[Metric]:
        """Yields wanted workers, serving workers, and the metrics of a recent report."""
        is_fresh = self.is_fresh
        yield GaugeMetricFamily(
            "baton_controller_up", "1 while a controller reports to this gateway", is_fresh
        )
        yield from self._pools()
        if is_fresh and self._news is not None:
            try:
                yield from decode_metrics(self._news.metrics)
            except msgspec.DecodeError as error:  # the controller runs another version of Baton
                log.warning("the controller's metrics cannot be read: %s", error)

    def _pools(self) -> Iterator[Metric]:
        labels, pools = ("version", "role"), self.pools or ()
        wanted = [((pool.version, pool.role.value), pool.wanted) for pool in pools]
        serving = [((pool.version, pool.role.value), pool.serving) for pool in pools]
        yield gauge("baton_pool_wanted_workers", "Workers ordered", labels, wanted)
        text = "Workers with a session of this gateway"
        yield gauge("baton_pool_serving_workers", text, labels, serving)
