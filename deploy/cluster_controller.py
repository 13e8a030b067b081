"""Starts a deployment on a cluster of Ray as `baton.yaml` describes it.

Every node that is there fetches the model first, which may take longer than a worker is waited for;
a node that comes later fetches it when its first worker starts.
"""

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster import plan_of
from deploy.model_source import default_cache, local_model
from deploy.ray_controller import start_controller
from deploy.up_config import UpConfig
from engine.config import PoolsConfig
from engine.errors import ConfigError

FETCH_TIMEOUT_S = 4 * 3600.0


def start_deployment(config: UpConfig) -> None:
    """In the cluster that this process has joined; waits until it serves. Raises ConfigError."""
    nodes = nodes_for_workers(ray.nodes(), config.config.pools)
    cores = sum(int(node["Resources"].get("CPU", 0.0)) for node in nodes)
    plan = plan_of(config.model, config.config, cores=max(1, cores))
    _fetch_everywhere(plan.model, nodes)
    start_controller(plan)


def nodes_for_workers(nodes: list[dict[str, Any]], pools: PoolsConfig) -> list[dict[str, Any]]:
    """Nodes that live, of those that `ray.nodes` tells, and that workers may be put on.

    Raises ConfigError where a pool has none.
    """
    alive = [node for node in nodes if node["Alive"]]
    wanted = [name for name in (pools.prefill_resource, pools.decode_resource) if name is not None]
    for name in wanted:
        if not any(node["Resources"].get(name) for node in alive):
            raise ConfigError(f"no node of the cluster offers {name}, which the pools are to use")
    if len(wanted) < 2:
        return alive
    return [node for node in alive if any(node["Resources"].get(name) for name in wanted)]


def _fetch_everywhere(model: str, nodes: list[dict[str, Any]]) -> None:
    """On all of the nodes at once."""
    fetches = {
        node["NodeManagerAddress"]: ray.remote(num_cpus=0)(_fetch)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            max_retries=0,
        )
        .remote(model)
        for node in nodes
    }
    for address, fetch in fetches.items():
        try:
            error = ray.get(fetch, timeout=FETCH_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as failure:
            error = str(failure).splitlines()[0]
        if error:
            raise ConfigError(f"{address}: {error}")


def _fetch(model: str) -> str:
    """On a node: what is wrong, or nothing."""
    try:
        local_model(model, cache=default_cache(os.environ))
    except ConfigError as error:
        return str(error)
    return ""
