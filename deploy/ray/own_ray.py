"""A Ray for this machine only. It listens on loopback, and each call needs a token.

`prepare` sets Ray's settings in the environment. Ray reads them when it is imported, so `prepare`
must run before:

    loopback   If a cluster is possible, Ray replaces 127.0.0.1 by the network card's address and
               binds every interface. In its mode for macOS and Windows it binds 127.0.0.1 only.
    token      Each call to one of Ray's processes must carry the token. Each process that starts a
               Ray makes a new token. Ray's processes get the token in their environment.
    no report  Ray sends no usage statistics.
    no exit    After the death of the raylet, Ray would silently end this process: when this process
               uses the object store, or at any call if its parent is init, as under systemd. So
               Baton puts no value into that store, and names this process as the raylet to Ray.
               Ray's own processes get the id of the real raylet.
    signals    Ray's failure handler would replace our handler of SIGTERM, and end this process.

The GCS of this Ray stores its state in RocksDB, in Ray's folder. So a keeper can restart the GCS
(`deploy.ray.gcs_keeper`). Without a GCS, actors keep running for at most RECONNECT_TIMEOUT_S.

Ray makes its session folder, which has sockets and logs, writable for everyone. So Ray's session
folder is made inside a private folder.
"""

import ipaddress
import logging
import os
import secrets
import threading
from collections.abc import MutableMapping

from deploy.base.private_folder import PrivateFolder, end_users_of
from deploy.ray.gcs_keeper import GCS, GcsSupervisor, running
from engine.clock import MonotonicClock
from engine.errors import ConfigError

NAMESPACE = "baton"
LOOPBACK = "127.0.0.1"
RECONNECT_TIMEOUT_S = 600  # after this time without a GCS, Ray's processes end
HEALTH_CHECKS = 200  # one every 3 s; then Ray counts actors without a raylet as dead
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum; no value is stored there
INLINE_BYTES = 64 * 2**20  # larger than any argument or answer of an actor


def prepare(environment: MutableMapping[str, str]) -> None:
    """Sets the environment for a Ray that this process will start.

    Call this before Ray is imported.
    """
    environment.update(
        {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_RAYLET_PID": str(os.getpid()),
            "RAY_max_direct_call_object_size": str(INLINE_BYTES),
            "RAY_task_rpc_inlined_bytes_limit": str(INLINE_BYTES),
            "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
            # Services bound their log lines and name their process in each line (`deploy.logs`). So
            # Ray must print all lines unchanged.
            "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
            "RAY_DEDUP_LOGS": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S),
            "RAY_health_check_failure_threshold": str(HEALTH_CHECKS),
            # By default Ray gives actors a low priority (nice 15). Beside another program, a
            # service would then get a thirtieth of a core.
            "RAY_worker_niceness": "0",
            # Actors without GPUs keep this process's CUDA_VISIBLE_DEVICES, and Ray prints no
            # warning.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    )


class OwnRay:
    """A Ray that this process starts and stops. `prepare` must run before Ray is imported."""

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._keeper: GcsSupervisor | None = None
        self._num_gcs_restarts = 0  # restarts by earlier keepers

    @property
    def num_gcs_restarts(self) -> int:
        """The number of times that the GCS was restarted."""
        return self._num_gcs_restarts + (self._keeper.num_restarts if self._keeper else 0)

    def open(self) -> None:
        """Starts Ray and joins it.

        Raises ConfigError if Ray listens on another address than loopback.
        """
        import ray  # Ray's processes inherit the environment that `prepare` set

        self._folder = folder = PrivateFolder()
        folder.open()
        gcs_folder = folder.path / "gcs"
        gcs_folder.mkdir()
        try:
            ray.init(
                address="local",
                namespace=NAMESPACE,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder.path / "ray"),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=True,
                _system_config={"gcs_storage": "rocksdb", "gcs_storage_path": str(gcs_folder)},
            )
        except BaseException:
            folder.leave()
            raise
        address = ray.util.get_node_ip_address()
        if not ipaddress.ip_address(address).is_loopback:
            self.close()
            raise ConfigError(
                f"Ray listens on {address}: it was imported before its environment was prepared,"
                " or this version of Ray does not know RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
            )
        self._keep_gcs()

    def close(self) -> None:
        """Stops Ray and removes its session folder. If Ray's start failed, its logs are kept."""
        import ray

        if not ray.is_initialized():
            return
        if self._keeper is not None:
            self._keeper.stop()
        if self._folder is not None:  # otherwise Ray waits up to a second for each of its monitors
            end_users_of(self._folder.path, only_helpers=True)
        ray.shutdown()
        if self._keeper is not None:
            self._keeper.end_gcs()
            self._num_gcs_restarts += self._keeper.num_restarts
            self._keeper = None
        if self._folder is not None:
            end_users_of(self._folder.path)  # Ray's agents outlive a killed GCS
            self._folder.close()
            self._folder = None

    def _keep_gcs(self) -> None:
        """Starts a keeper of the GCS in a thread. Raises ConfigError if the GCS cannot be found."""
        import ray

        context = ray.get_runtime_context()
        session, port = context.get_session_name(), int(context.gcs_address.rpartition(":")[2])
        found = [each for each in running(GCS) if each.session == session]
        if not found:
            self.close()
            raise ConfigError(f"no GCS of Ray's session {session} runs on this machine")
        keeper = GcsSupervisor(found[0].at_port(port), MonotonicClock(), shares_fate=True)
        threading.Thread(target=keeper.run, name="gcs keeper", daemon=True).start()
        self._keeper = keeper
