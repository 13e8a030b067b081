"""Makes the report of the pools' state that the controller sends to gateways, for the dashboard and
operators.

Pure: the report depends only on the machine, the planner and the answers of started processes.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from deploy.base.spec import GatewayReady, WorkerReady
from deploy.pools.machine import PoolMachine
from deploy.pools.planning import Planning
from deploy.pools.workers.record import PoolWorker
from engine.control import (
    SERVING_ROLES,
    CanaryReport,
    ClusterReport,
    DecisionReport,
    GatewaySummary,
    Pools,
    Version,
    VersionSummary,
    WorkerReport,
)
from engine.messages import WorkerId

MAX_STEPS, MAX_DECISIONS, MAX_WORKERS = 200, 50, 2000
MAX_TEXT = 500  # maximum number of characters in a reason


def cluster_report(  # noqa: PLR0913 - all that the report is about
    machine: PoolMachine,
    planning: Planning,
    *,
    workers: Mapping[WorkerId, WorkerReady],
    gateways: Mapping[str, GatewayReady],
    counters: dict[str, int],
    admin_url: str,
    epoch_s: float,
) -> ClusterReport:
    """Returns the report. `epoch_s` is the Unix time at which the controller's clock was 0."""
    rollout = machine.intent.rollout
    there = sorted(machine.workers.values(), key=PoolWorker.order)[:MAX_WORKERS]
    return ClusterReport(
        admin_url=admin_url,
        settled=machine.is_settled,
        troubles=machine.troubles(),
        max_workers=machine.limits.max_workers,
        planner=machine.intent.planner.value,
        planner_reasons=tuple(_short(reason) for reason in planning.reasons),
        taking_over=None if rollout is None else rollout.to,
        versions=[
            VersionSummary(**version_fields(machine, each)) for each in machine.intent.versions
        ],
        workers=[_worker(machine, each, ready_of(each, workers), epoch_s) for each in there],
        gateways=[_gateway(machine, name, gateways.get(name)) for name in machine.gateways],
        counters=counters,
        steps=[
            msgspec.structs.replace(
                each, at_s=epoch_s + each.at_s, what=_short(each.what), why=_short(each.why)
            )
            for each in list(machine.history)[-MAX_STEPS:]
        ],
        decisions=[
            DecisionReport(
                each.number,
                epoch_s + each.at_s,
                mode=each.mode.value,
                outcome=each.outcome.value,
                summary=_short(str(each)),
                reasons=tuple(_short(reason) for reason in each.reasons),
            )
            for each in list(planning.decisions)[-MAX_DECISIONS:]
        ],
        canary=_canary(machine, epoch_s),
    )


def ready_of(worker: PoolWorker, workers: Mapping[WorkerId, WorkerReady]) -> WorkerReady | None:
    """Returns the answer that the worker's process gave at its start.

    None while no process runs.
    """
    return None if worker.address is None else workers.get(worker.worker_id)


def worker_fields(
    machine: PoolMachine, worker: PoolWorker, ready: WorkerReady | None
) -> dict[str, Any]:
    """Returns the fields of a `WorkerSummary`.

    `ready` is the answer that the worker gave at its start.
    """
    restarts = machine.restarts
    return {
        "worker_id": worker.worker_id,
        "version": worker.version,
        "role": worker.role,
        "target": worker.target,
        "state": worker.shown_state,
        "is_connected": worker.is_connected,
        "is_leaving": worker.leaves,
        "failures": restarts.num_failed(worker.worker_id),
        "is_crash_looping": restarts.is_looping(worker.worker_id),
        "num_blocks": 0 if ready is None else ready.num_blocks,
        "leaving_seqs": worker.num_leaving_seqs,
        "kernels": worker.kernels,
        "why": restarts.why(worker.worker_id),
    }


def version_fields(machine: PoolMachine, version: Version) -> dict[str, Any]:
    """Returns the fields of a `VersionSummary`."""
    serving = machine.serving(version.name)
    return {
        "name": version.name,
        "model_name": version.model_name,
        "wanted": version.pools,
        "serving": Pools(*(serving[role] for role in SERVING_ROLES)),
        "weight": version.weight,
        "is_current": machine.intent.is_current(version),
        "is_leaving": version.is_leaving,
        "is_asleep": version.asleep is not None,
        "line": version.line,
    }


def _worker(
    machine: PoolMachine, worker: PoolWorker, ready: WorkerReady | None, epoch_s: float
) -> WorkerReport:
    fields = worker_fields(machine, worker, ready)
    fields["why"] = _short(fields["why"])
    return WorkerReport(**fields, since_s=epoch_s + worker.since_s)


def _canary(machine: PoolMachine, epoch_s: float) -> CanaryReport | None:
    standing, rollout = machine.canary, machine.intent.rollout
    if standing is None or rollout is None:
        return None
    version = machine.intent.version(rollout.to)
    return CanaryReport(
        name=rollout.to,
        verdict=standing.verdict.value,
        weight=0 if version is None else version.weight,
        since_s=0.0 if standing.begun_s is None else epoch_s + standing.begun_s,
        hold_s=rollout.hold_s,
        shares=rollout.canary,
        min_requests=machine.limits.update.min_requests,
        own=standing.own,
        others=standing.others,
    )


def _gateway(machine: PoolMachine, name: str, ready: GatewayReady | None) -> GatewaySummary:
    url = "" if ready is None else ready.url
    return GatewaySummary(name=name, url=url, state=machine.gateways[name].value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
