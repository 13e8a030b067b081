"""A Ray for this machine alone: it listens on loopback and requires a token on each call.

Ray reads these settings from the environment when it is imported, so `prepare` comes before that:

    loopback   If a cluster is possible, Ray replaces 127.0.0.1 by the network card's address and
               binds every interface. In its mode for macOS and Windows it binds 127.0.0.1 only.
    token      Each call to one of Ray's processes must carry it. It is new for each process that
               starts a Ray, and reaches Ray's processes in their environment.
    no report  Ray sends no usage statistics.
    no exit    After the death of its raylet, Ray would silently end this process: when this process
               uses the object store, and at any call if its parent is init, as under systemd. So no
               value goes to that store, and Ray is told that this process is the raylet. Ray's own
               processes get the id of the real raylet.
    signals    Ray's failure handler would replace our handler of SIGTERM, and end this process.

The GCS of this Ray stores its state in RocksDB, in the same folder, so that a keeper can start it
again (`deploy.ray.gcs_keeper`). Actors go on meanwhile, for at most RECONNECT_TIMEOUT_S.

Ray makes its session folder, which holds sockets and logs, writable for everyone. So that folder is
made inside a private one.
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
RECONNECT_TIMEOUT_S = 600  # then Ray's processes end without a GCS
HEALTH_CHECKS = 200  # every 3 s; until then, actors without a raylet count as alive
OBJECT_STORE_BYTES = 80 * 2**20  # the minimum of Ray; no value goes there
INLINE_BYTES = 64 * 2**20  # more than any argument or answer of an actor


def prepare(environment: MutableMapping[str, str]) -> None:
    """Sets the environment for a Ray that this process will start, before Ray is imported."""
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
            # Lines of services name their process, and are bounded (`deploy.logs`): Ray shows them
            # as they are, and leaves none out.
            "RAY_DISABLE_WORKER_LOG_PREFIX": "1",
            "RAY_DEDUP_LOGS": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S),
            "RAY_health_check_failure_threshold": str(HEALTH_CHECKS),
            # Actors serve: as the background work that Ray takes them for (nice 15) they would get
            # a thirtieth of a core beside another program.
            "RAY_worker_niceness": "0",
            # Actors without GPUs keep our CUDA_VISIBLE_DEVICES, and Ray gives no warning.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    )


class OwnRay:
    """A Ray that this process starts and stops. `prepare` must run before Ray is imported."""

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._keeper: GcsSupervisor | None = None
        self._num_gcs_restarts = 0  # before this keeper

    @property
    def num_gcs_restarts(self) -> int:
        """How often the GCS had to be started again."""
        return self._num_gcs_restarts + (self._keeper.num_restarts if self._keeper else 0)

    def open(self) -> None:
        """Starts Ray and joins it. Raises ConfigError if it would listen beyond loopback."""
        import ray  # its processes inherit the environment of `prepare`

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
        """Stops Ray and removes its session folder. If Ray did not start, its logs stay."""
        import ray

        if not ray.is_initialized():
            return
        if self._keeper is not None:
            self._keeper.stop()
        if self._folder is not None:  # Ray waits up to a second for each of its monitors
            end_users_of(self._folder.path, only_helpers=True)
        ray.shutdown()
        if self._keeper is not None:
            self._keeper.end_gcs()
            self._num_gcs_restarts += self._keeper.num_restarts
            self._keeper = None
        if self._folder is not None:
            end_users_of(self._folder.path)  # agents outlive a killed GCS
            self._folder.close()
            self._folder = None

    def _keep_gcs(self) -> None:
        """Watches the GCS in a thread. Raises ConfigError if it cannot be found."""
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
