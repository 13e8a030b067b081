"""vLLM's router in front of a server of streams: `PYTHON bench/peers/vllm_router.py BACKEND_PORT`.

The router is a child process of this process. This process only announces the router's address, in
the protocol of `driver.py`, and ends the router when standard input is closed.
"""

import importlib.metadata
import json
import socket
import subprocess
import sys
import time

START_TIMEOUT_S = 30.0


def free_port() -> int:
    """Returns a port on which no process listens at present."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def main() -> None:
    """Runs the router until standard input is closed."""
    port = free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--worker-urls": f"http://127.0.0.1:{sys.argv[1]}",
        "--policy": "round_robin",
        "--log-level": "error",
        "--prometheus-port": str(free_port()),
    }
    arguments = [word for option in options.items() for word in option]
    router = subprocess.Popen(
        [sys.executable, "-m", "vllm_router.launch_router", *arguments], stdout=sys.stderr
    )
    try:
        end_s = time.perf_counter() + START_TIMEOUT_S
        while not answers(port):
            if router.poll() is not None or time.perf_counter() > end_s:
                print(json.dumps({"error": "the router did not start"}), flush=True)  # noqa: T201
                return
            time.sleep(0.1)
        version = importlib.metadata.version("vllm-router")
        print(json.dumps({"ready": {"port": port, "version": version}}), flush=True)  # noqa: T201
        sys.stdin.read()
    finally:
        router.kill()
        router.wait()


def answers(port: int) -> bool:
    """Returns True if a process listens on this port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    main()
