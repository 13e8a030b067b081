"""The machine's resources that a worker process uses."""

from deploy.worker.process_facts import cpu_s, process_gauges
from router.gateway.metrics.workers import GAUGE_TEXTS


def test_this_process_uses_memory_files_and_time():
    gauges = process_gauges()
    assert gauges["resident_memory_bytes"] > 2**20
    assert 0 < gauges["open_fds"] < gauges["max_fds"]
    assert cpu_s() > 0
    assert gauges.keys() <= GAUGE_TEXTS.keys()
