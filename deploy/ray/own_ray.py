"""A Ray for this machine alone: it listens on loopback and requires a token on each call.

Ray reads three settings from the environment when it is imported, so `prepare` comes before that:

    loopback   If a cluster is possible, Ray replaces 127.0.0.1 by the network card's address and
               binds every interface. In its mode for macOS and Windows it binds 127.0.0.1 only.
    token      Each call to one of Ray's processes must carry it. It is new for each process that
               starts a Ray, and reaches Ray's processes in their environment.
    no report  Ray sends no usage statistics.

Ray makes its session folder, which holds sockets and logs, writable for everyone. So that folder is
made inside a private one.
"""

import ipaddress
import logging
import secrets
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from engine.errors import ConfigError

NAMESPACE = "baton"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 2**20  # the minimum of Ray; KV and tokens never go there


def prepare(environment: MutableMapping[str, str]) -> None:
    """Sets the environment for a Ray that this process will start, before Ray is imported."""
    environment.update(
        {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Actors without GPUs keep our CUDA_VISIBLE_DEVICES, and Ray gives no warning.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    )


class OwnRay:
    """A Ray that this process starts and stops. `prepare` must run before Ray is imported."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def open(self) -> None:
        """Starts Ray and joins it. Raises ConfigError if it would listen beyond loopback."""
        import ray  # its processes inherit the environment of `prepare`

        self._folder = Path(tempfile.mkdtemp(prefix="baton-"))
        ray.init(
            address="local",
            namespace=NAMESPACE,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(self._folder / "ray"),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
        address = ray.util.get_node_ip_address()
        if not ipaddress.ip_address(address).is_loopback:
            self.close()
            raise ConfigError(
                f"Ray listens on {address}: it was imported before its environment was prepared,"
                " or this version of Ray does not know RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
            )

    def close(self) -> None:
        """Stops Ray and removes its session folder. If Ray did not start, its logs stay."""
        import ray

        if not ray.is_initialized():
            return
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
