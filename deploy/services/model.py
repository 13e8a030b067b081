"""Finds the model of a service on this machine, and fetches the model if necessary."""

import logging
import os
from pathlib import Path

from deploy.base.spec import READY_TIMEOUT_S, SLOWEST_BYTES_PER_S, ServiceSpec, WorkerSpec
from deploy.fetching.cache import Parts
from deploy.fetching.names import is_remote
from deploy.model_source import default_cache, local_model

log = logging.getLogger(__name__)


def has_to_fetch(spec: ServiceSpec) -> bool:
    """True if `fetch` may take long.

    False for gateways, which fetch their few files while they open.
    """
    return isinstance(spec, WorkerSpec) and is_remote(spec.model)


def fetch(spec: ServiceSpec) -> None:
    """Downloads a worker's model to this machine if necessary. Raises ConfigError."""
    if isinstance(spec, WorkerSpec):
        directory_of(spec.model, Parts.ALL)


def start_limit_s(spec: ServiceSpec) -> float:
    """Returns how many seconds a start may take: more for a large model, which must be on this
    machine.
    """
    if not isinstance(spec, WorkerSpec):
        return READY_TIMEOUT_S
    folder = directory_of(spec.model, Parts.ALL)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return READY_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S


def directory_of(model: str, parts: Parts) -> Path:
    """Returns the model's directory on this machine.

    Fetches the model if necessary. Raises ConfigError.
    """
    return local_model(model, cache=default_cache(os.environ), parts=parts, report=log.warning)
