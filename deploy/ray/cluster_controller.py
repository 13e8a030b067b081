"""Starts a deployment on a Ray cluster as `baton.yaml` describes it.

All present nodes fetch the models first, at the same time. A node that joins later fetches it when
its first worker starts.
"""

import os
from collections.abc import Sequence

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.base.cluster_config import UpConfig
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.local.deployment import plan_of
from deploy.model_source import default_cache, local_model
from deploy.pools.placement import Node, nodes_to_start_on
from deploy.ray.controller import start_controller
from deploy.ray.places import nodes
from engine.errors import ConfigError


def start_deployment(config: UpConfig) -> None:
    """Starts it in the joined cluster and waits until it serves. Raises ConfigError."""
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
    """Fetches the model on all nodes at once. Raises ConfigError."""
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
    """Fetches the model on this node; returns the error, or nothing."""
    try:
        local_model(model, cache=default_cache(os.environ))
    except ConfigError as error:
        return str(error)
    return ""
