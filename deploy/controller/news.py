"""The news of the pools that the controller sends to gateways, for people who look at them.

Pure: a function of the machine, the planner and what is known of processes.
"""

from collections.abc import Mapping

from deploy.base.spec import GatewayReady, WorkerReady
from deploy.pools.machine import PoolMachine
from deploy.pools.planning import Planning
from deploy.pools.workers.record import PoolWorker
from engine.control import (
    SERVING_ROLES,
    CanaryNews,
    ClusterNews,
    DecisionNews,
    GatewayNews,
    Pools,
    StepNews,
    Version,
    VersionNews,
    WorkerNews,
)
from engine.messages import WorkerId

MAX_STEPS, MAX_DECISIONS, MAX_WORKERS = 200, 50, 2000
MAX_TEXT = 500  # characters of a reason


def news_of(  # noqa: PLR0913 - all that the news are about
    machine: PoolMachine,
    planning: Planning,
    *,
    workers: Mapping[WorkerId, WorkerReady],
    gateways: Mapping[str, GatewayReady],
    counters: dict[str, int],
    admin_url: str,
    epoch_s: float,
) -> ClusterNews:
    """Returns the news. `epoch_s` is the Unix time at which the controller's clock was 0."""
    rollout = machine.intent.rollout
    there = sorted(machine.workers.values(), key=PoolWorker.order)[:MAX_WORKERS]
    return ClusterNews(
        admin_url=admin_url,
        settled=machine.is_settled,
        troubles=machine.troubles(),
        max_workers=machine.limits.max_workers,
        planner=machine.intent.planner.value,
        planner_reasons=tuple(_short(reason) for reason in planning.reasons),
        taking_over=None if rollout is None else rollout.to,
        versions=[_version(machine, each) for each in machine.intent.versions],
        workers=[_worker(machine, each, workers, epoch_s) for each in there],
        gateways=[_gateway(machine, name, gateways.get(name)) for name in machine.gateways],
        counters=counters,
        steps=[
            StepNews(
                each.number,
                epoch_s + each.at_s,
                each.subject,
                _short(each.what),
                _short(each.why),
                each.role,
            )
            for each in list(machine.history)[-MAX_STEPS:]
        ],
        decisions=[
            DecisionNews(
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


def _worker(
    machine: PoolMachine,
    worker: PoolWorker,
    ready: Mapping[WorkerId, WorkerReady],
    epoch_s: float,
) -> WorkerNews:
    known = ready.get(worker.worker_id) if worker.address is not None else None
    return WorkerNews(
        worker_id=worker.worker_id,
        version=worker.version,
        role=worker.role,
        target=worker.target,
        state=worker.shown_state.value,
        since_s=epoch_s + worker.since_s,
        is_connected=worker.is_connected,
        is_leaving=worker.leaves,
        failures=machine.restarts.num_failed(worker.worker_id),
        is_crash_looping=machine.restarts.is_looping(worker.worker_id),
        num_blocks=0 if known is None else known.num_blocks,
        leaving_seqs=worker.num_leaving_seqs,
        kernels=worker.kernels,
        why=_short(machine.restarts.why(worker.worker_id)),
    )


def _version(machine: PoolMachine, version: Version) -> VersionNews:
    serving = machine.serving(version.name)
    return VersionNews(
        name=version.name,
        model_name=version.model_name,
        wanted=version.pools,
        serving=Pools(*(serving[role] for role in SERVING_ROLES)),
        weight=version.weight,
        is_current=machine.intent.is_current(version),
        is_leaving=version.is_leaving,
        is_asleep=version.asleep is not None,
        line=version.line,
    )


def _canary(machine: PoolMachine, epoch_s: float) -> CanaryNews | None:
    standing, rollout = machine.canary, machine.intent.rollout
    if standing is None or rollout is None:
        return None
    version = machine.intent.version(rollout.to)
    return CanaryNews(
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


def _gateway(machine: PoolMachine, name: str, ready: GatewayReady | None) -> GatewayNews:
    url = "" if ready is None else ready.url
    return GatewayNews(name=name, url=url, state=machine.gateways[name].value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
