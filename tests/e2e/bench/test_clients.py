"""The processes of `bench clients`: harnesses, and the server of known latencies."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession, web

from bench.clients.cost import run_harness
from bench.clients.results import ClientFailed
from bench.clients.server import KnownServer

LEAVES_A_CHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
sys.exit(int(sys.argv[1]))
"""


def lives(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_harness_that_fails_is_told_with_its_last_lines_and_leaves_nothing():
    with pytest.raises(ClientFailed) as caught:
        run_harness([sys.executable, "-c", LEAVES_A_CHILD, "3"], dict(os.environ))
    pid = str(caught.value).split()[-1]
    assert (
        not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    )


def test_all_time_of_a_harness_counts():
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    cost = run_harness([sys.executable, "-c", burn], dict(os.environ))
    assert 0.3 <= cost.cpu_s < 5  # the kernel counts in ticks


def test_the_server_keeps_its_latencies_and_tells_when_it_was_asked():
    async def go():
        runner = web.AppRunner(KnownServer(0.05, 0.01).app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession() as session:
            body = {"prompt": "a b", "max_tokens": 4}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                text = await response.text()
            windows = [await (await session.get(f"{url}/window")).json() for _ in range(2)]
        await runner.cleanup()
        return text, windows

    text, ((begin_s, end_s), again) = asyncio.run(go())
    assert text.count('" word"') == 2 * 4  # as text and as delta
    assert '"completion_tokens": 4' in text
    assert end_s - begin_s >= 0.05 + 3 * 0.01
    assert again == []
