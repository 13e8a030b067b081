"""Keeps the orders of a cluster's operators in Ray's own table of keys and values.

The table lives in the GCS: it outlives controller and gateways together. It outlives the head too
if the GCS keeps its state in Redis or RocksDB.
"""

import threading
from typing import Any

import ray

from deploy.controller.intents import BadIntents, IntentStore
from deploy.ray.own_ray import NAMESPACE

KEY = "orders"


class RayOrders(IntentStore):
    """One record in the Ray that this process has joined. Calls wait for a dead GCS, for long."""

    def __init__(self) -> None:
        self._is_removed = False
        self._lock = threading.Lock()  # a write may still run in a thread when the end comes

    def __str__(self) -> str:
        return "Ray's table of keys"

    def read(self) -> bytes | None:
        """Returns the record."""
        try:
            found = _table()._internal_kv_get(KEY, namespace=NAMESPACE)
        except (ray.exceptions.RayError, RuntimeError) as error:
            raise BadIntents(f"Ray's GCS does not answer: {error}") from error
        return None if found is None else bytes(found)

    def write(self, record: bytes) -> None:
        """Replaces the record."""
        with self._lock:
            if self._is_removed:
                return
            try:
                _table()._internal_kv_put(KEY, record, overwrite=True, namespace=NAMESPACE)
            except (ray.exceptions.RayError, RuntimeError) as error:
                raise BadIntents(f"Ray's GCS does not answer: {error}") from error

    def remove(self) -> None:
        """Removes the record."""
        with self._lock:
            self._is_removed = True
            try:
                _table()._internal_kv_del(KEY, namespace=NAMESPACE)
            except (ray.exceptions.RayError, RuntimeError) as error:
                raise BadIntents(f"Ray's GCS does not answer: {error}") from error


def _table() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
