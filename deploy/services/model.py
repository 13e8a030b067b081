"""Finds the model of a service on this machine, and fetches it."""

import logging
import os
from pathlib import Path

import msgspec

from deploy.base.spec import READY_TIMEOUT_S, SLOWEST_BYTES_PER_S, WorkerSpec
from deploy.fetching.cache import Parts
from deploy.fetching.names import is_remote
from deploy.model_source import default_cache, local_model

log = logging.getLogger(__name__)


def has_to_fetch(kind: str, spec: bytes) -> bool:
    """True if `fetch` may take long. Gateways fetch their few files while they open."""
    return kind == "worker" and is_remote(msgspec.json.decode(spec, type=WorkerSpec).model)


def fetch(kind: str, spec: bytes) -> None:
    """Downloads a worker's model to this machine if necessary.

    Raises ConfigError.
    """
    if kind == "worker":
        directory_of(msgspec.json.decode(spec, type=WorkerSpec).model, Parts.ALL)


def start_limit_s(kind: str, spec: bytes) -> float:
    """Returns how long a start may take: longer for a large model. It must be on this machine."""
    if kind != "worker":
        return READY_TIMEOUT_S
    folder = directory_of(msgspec.json.decode(spec, type=WorkerSpec).model, Parts.ALL)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return READY_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S


def directory_of(model: str, parts: Parts) -> Path:
    """Returns the model's directory on this machine. Fetches it if needed. Raises ConfigError."""
    return local_model(model, cache=default_cache(os.environ), parts=parts, report=log.warning)
