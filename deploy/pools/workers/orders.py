"""Carries out orders about workers and pools."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from deploy.pools.events import PoolEffect
from deploy.pools.formats import formats_of
from deploy.pools.orders import Adjust, Drain, Flip, OrderRefused, SetPlanner, SetPools, Stop
from deploy.pools.state import PoolState
from deploy.pools.versions import orders as versions
from deploy.pools.workers.reconcile import last_that
from deploy.pools.workers.record import PoolWorker, WorkerState
from deploy.pools.workers.registry import PoolWorkers
from engine.control import SERVING_ROLES, Pools, Version
from engine.messages import Role, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerOrders:
    """Handlers of orders. Each handler yields effects, or raises OrderRefused before any change."""

    workers: PoolWorkers
    state: PoolState

    def set_pools(self, order: SetPools, now_s: float) -> Iterator[PoolEffect]:
        """Sets the wanted number of workers of each role."""
        state = self.state
        name = order.version or state.intent.current.name
        intent = versions.resized(state.intent, name, order.pools)
        self._check_room(versions.known(state.intent, name), order.pools)
        state.intent = intent
        subject = "pools" if len(intent.versions) == 1 else f"pools of {name}"
        what = f"are to be {counts_text(order.pools)}"
        yield self.state.record(now_s, subject, what, order.why)

    def flip(self, order: Flip, now_s: float) -> Iterator[PoolEffect]:
        """Gives a worker another role."""
        worker = self._known(order.worker_id)
        self._check_flip(worker, order.role)
        self.state.intent = versions.moved(self.state.intent, worker, order.role)
        worker.refuses.discard(order.role)
        yield from self.workers.flip(worker, order.role, "ordered", now_s)

    def drain(self, order: Drain, now_s: float) -> Iterator[PoolEffect]:
        """Takes all work from a worker. The worker keeps running."""
        worker = self._known(order.worker_id)
        _check_takes_orders(worker, Role.DRAINED)
        self._check_not_last(worker, Role.DRAINED)
        yield from self._take_out(worker, now_s)

    def stop(self, order: Stop, now_s: float) -> Iterator[PoolEffect]:
        """Drains a worker and stops it."""
        worker = self._known(order.worker_id)
        if worker.state is WorkerState.STOPPING or worker.leaves:
            raise OrderRefused(f"{worker.worker_id} is being stopped already")
        if worker.target is None:
            raise OrderRefused(f"{worker.worker_id} was just found; its role is not known yet")
        self._check_not_last(worker, Role.DRAINED)
        if worker.target is not Role.DRAINED:
            yield from self._take_out(worker, now_s)
        worker.leaves = True
        if worker.state in (WorkerState.WAITING, WorkerState.STARTING):
            yield from self._end_start(worker, now_s)
        elif worker.state is WorkerState.DRAINED or not worker.is_connected:
            yield self.workers.end(worker, now_s, by_force=not worker.is_connected)

    def set_planner(self, order: SetPlanner, now_s: float) -> Iterator[PoolEffect]:
        """Switches the planner to the ordered mode."""
        self.state.intent = msgspec.structs.replace(self.state.intent, planner=order.mode)
        yield self.state.record(now_s, "planner", f"is {order.mode}", "ordered")

    def adjust(self, order: Adjust, now_s: float) -> Iterator[PoolEffect]:
        """Changes the settings that only the controller uses."""
        self.state.intent = msgspec.structs.replace(self.state.intent, live=order.settings)
        yield self.state.record(now_s, "pools", "have other settings", "ordered")

    def _take_out(self, worker: PoolWorker, now_s: float) -> Iterator[PoolEffect]:
        """Drains a worker, and reduces the wanted size of its pool by one."""
        self.state.intent = versions.moved(self.state.intent, worker, Role.DRAINED)
        if worker.state in (WorkerState.WAITING, WorkerState.STARTING):
            worker.target = Role.DRAINED
        else:
            yield from self.workers.drain(worker, "ordered", now_s)

    def _end_start(self, worker: PoolWorker, now_s: float) -> Iterator[PoolEffect]:
        """Ends a worker that waits for its start or is starting."""
        worker_id = worker.worker_id
        if worker.state is WorkerState.WAITING:
            self.workers.remove(worker)
            yield self.state.record(now_s, worker_id, "is not started", "ordered")
        else:
            yield self.state.record(now_s, worker_id, "is stopped while it starts", "ordered")
            yield self.workers.end(worker, now_s, by_force=True)

    # ------------------------------------------------------------ checks

    def _check_room(self, version: Version, pools: Pools) -> None:
        limits, kept = self.state.limits, self.workers.kept()
        others = (each for each in self.state.intent.versions if each is not version)
        of_others = sum(each.pools.total for each in others)
        # After the loss of a node there may be more workers than room. Workers may still change
        # roles.
        grows = pools.total > version.pools.total
        if grows and pools.total + of_others + len(kept) > limits.max_workers:
            beside = f" beside {', '.join(kept)}, drained," if kept else ""
            beside += f" beside {of_others} of other versions" if of_others else ""
            why = f": {limits.why_no_more}" if limits.why_no_more else ""
            raise OrderRefused(
                f"{pools.total} workers{beside} are more than the {limits.max_workers} "
                f"there can be{why}"
            )

    def _check_flip(self, worker: PoolWorker, role: Role) -> None:
        if role is Role.DRAINED:
            raise OrderRefused("a flip cannot drain a worker: order a drain", status=400)
        _check_takes_orders(worker, role)
        version = versions.known(self.state.intent, worker.version)
        needed = formats_of(version)[role]
        if worker.kv_format != needed:
            raise OrderRefused(
                f"{worker.worker_id} holds KV as {worker.kv_format}, {role} workers as {needed}"
            )
        self._check_not_last(worker, role)

    def _check_not_last(self, worker: PoolWorker, role: Role) -> None:
        what = last_that(worker, role, self.workers.by_id.values())
        if what is not None:
            raise OrderRefused(f"{worker.worker_id} is the last worker that {what}")

    def _known(self, worker_id: WorkerId) -> PoolWorker:
        worker = self.workers.by_id.get(worker_id)
        if worker is None:
            there = ", ".join(self.workers.listed()) or "none"
            raise OrderRefused(f"no worker is called {worker_id}; there are: {there}", status=404)
        return worker


def _check_takes_orders(worker: PoolWorker, role: Role) -> None:
    if worker.target is role:
        raise OrderRefused(f"{worker.worker_id} is {role} already, or about to be")
    if not worker.is_connected or worker.leaves:
        raise OrderRefused(f"{worker.worker_id} is {worker.state}, and takes no orders now")


def counts_text(pools: Pools) -> str:
    """Returns the number of workers of each role as text, in the notation of the command line."""
    return " ".join(f"{role}={pools.of(role)}" for role in SERVING_ROLES)
