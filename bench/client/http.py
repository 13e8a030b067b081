"""HTTP sessions of all clients of benchmarks."""

import aiohttp

KEEP_ALIVE_S = 2.0  # below the servers' own (uvicorn: 5), so that the client closes first


def http_session(timeout_s: float, *, reuses_connections: bool = True) -> aiohttp.ClientSession:
    """Opens a session without a limit on connections; `timeout_s` bounds one request."""
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        if reuses_connections
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)
    )
