"""The cluster's side of `baton up`, `status` and `down`: `python -m deploy.ray.head VERB [FILE]`.

    start FILE   starts the controller as FILE declares, and waits until it serves. If a controller
                 runs already, applies the settings that FILE changes, and waits until this is done
    diff FILE    reports the settings whose value in FILE differs from the running value
    look         reports the nodes; needs no controller
    status       reports the nodes and the controller's pools
    stop         stops the controller and all its services; Ray keeps running

This program runs on the cluster's head over ssh, or else on the operator's machine. The last line
of its output is `ANSWER` and JSON. So the lines that login shells and Ray print before are ignored.

Before the controller starts, all present nodes fetch the models at the same time. A node that joins
later fetches the models when its first worker starts.
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.admin.declared import read_declaration
from deploy.admin.schema import RESTART, Declaration, Difference, PoolsAnswer
from deploy.base.defaults import UpConfig, load_up_config
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.local.deployment import plan_of
from deploy.model_source import default_cache, local_model
from deploy.pools.placement import Node, nodes_to_start_on
from deploy.ray.controller import (
    controller_declare,
    controller_differences,
    controller_pools,
    start_controller,
    stop_deployment,
)
from deploy.ray.own_ray import NAMESPACE
from deploy.ray.places import nodes
from deploy.ray.up import ANSWER, ClusterNode, HeadAnswer, Status
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError

SETTLE_TIMEOUT_S = 4 * 3600.0  # long, because a version may fetch its model
SETTLE_EVERY_S = 1.0


def connect(address: str) -> None:
    """Joins a running cluster. Raises ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False
        )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"no cluster of Ray answers at {address}: {why}") from error


def look() -> Status:
    """Returns the nodes of the cluster that this process has joined. Needs no controller."""
    nodes = tuple(
        ClusterNode(
            node["NodeManagerAddress"],
            node["Alive"],
            {k: v for k, v in node["Resources"].items() if not k.startswith(("node:", "object_"))},
        )
        for node in ray.nodes()
    )
    session = ray.get_runtime_context().get_session_name()
    return Status(session, nodes, None)


def act(verb: str, address: str, file: Path | None) -> Status:
    """Carries out a verb. Returns the new state of the cluster. Raises ConfigError."""
    connect(address)
    match verb, file:
        case "start", Path():
            config = load_up_config(file)
            if controller_pools() is None:
                start_deployment(config)
            else:
                return carry_out(read_declaration(file))
        case "diff", Path():
            found = controller_differences(read_declaration(file))
            return _status(differences=found, left=found)
        case "stop", _:
            stop_deployment()
        case "look", _:
            return look()
        case "status", _:
            pass
        case _:
            raise ConfigError(
                f"unknown verb {verb}: use start FILE, diff FILE, look, status or stop"
            )
    return _status()


def carry_out(declared: Declaration) -> Status:
    """Orders the declared changes, and waits until they have been carried out.

    Raises ConfigError.
    """
    found = left = controller_differences(declared)
    before: tuple[Difference, ...] = ()
    clock, pause = MonotonicClock(), threading.Event()
    end_s = clock.now_s() + SETTLE_TIMEOUT_S
    while left != before and any(each.order != RESTART for each in left):  # one version a round
        answer: PoolsAnswer | None = controller_declare(declared)
        while answer is not None and not answer.settled and clock.now_s() < end_s:
            pause.wait(SETTLE_EVERY_S)
            answer = controller_pools()
        before, left = left, controller_differences(declared)
    return _status(differences=found, left=left)


def _status(**found: tuple[Difference, ...]) -> Status:
    return msgspec.structs.replace(look(), pools=controller_pools(), **found)


def main() -> int:
    """Runs one verb. Returns 1 if it failed."""
    verb, *rest = sys.argv[1:]
    address = os.environ.get("BATON_RAY_ADDRESS") or "auto"
    try:
        answer = HeadAnswer(status=act(verb, address, Path(rest[0]).expanduser() if rest else None))
    except BatonError as error:
        answer = HeadAnswer(error=str(error))
    sys.stdout.write(f"\n{ANSWER}{msgspec.json.encode(answer).decode()}\n")
    sys.stdout.flush()
    return 0 if answer.error is None else 1


def start_deployment(config: UpConfig) -> None:
    """Starts a deployment in the joined cluster, and waits until it serves. Raises ConfigError."""
    there = nodes()
    num_gpus = sum(int(node.has.get("GPU", 0.0)) for node in there)
    plan = plan_of(config.model, config.config, cores=1, memory_bytes=None, num_gpus=num_gpus)
    usable = nodes_to_start_on(there, config.config.pools, plan.pools, plan.num_gpus)
    cores = sum(int(node.has.get("CPU", 0.0)) for node in usable)
    memory_bytes = sum(int(node.has.get("memory", 0.0)) for node in usable)
    plan = msgspec.structs.replace(plan, cores=max(1, cores), memory_bytes=memory_bytes or None)
    for model in dict.fromkeys(version.model for version in plan.first_versions):
        _fetch_everywhere(model, usable)
    start_controller(plan)


def _fetch_everywhere(model: str, usable: Sequence[Node]) -> None:
    """Fetches the model on all nodes at the same time. Raises ConfigError."""
    fetches = {
        node.address: ray.remote(num_cpus=0)(_fetch)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            max_retries=0,
        )
        .remote(model)
        for node in usable
    }
    for address, fetch in fetches.items():
        try:
            error = ray.get(fetch, timeout=FETCH_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as failure:
            error = str(failure).splitlines()[0]
        if error:
            raise ConfigError(f"{address}: {error}")


def _fetch(model: str) -> str:
    """Fetches the model on this node. Returns the error; empty after success."""
    try:
        local_model(model, cache=default_cache(os.environ))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
