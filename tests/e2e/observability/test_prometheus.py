"""A real Prometheus with the shipped rules and dashboards scrapes a deployment."""

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from deploy.admin.client import AdminClient, find_deployment
from tests.kits.operator import Trickle
from tests.kits.services.prometheus import (
    SHIPPED,
    Prometheus,
    dashboard_queries,
    missing_programs,
    prometheus,
    promtool,
)
from tests.kits.services.served import HANDS_OVER, HTTP, Served, poll_until, serve

pytestmark = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"{', '.join(missing_programs())}: not here; Debian's package is `prometheus`",
)

SETTINGS = {
    "BATON_GATEWAY__PROCESSES": "2",
    "BATON_POOLS__PRICE_PER_HOUR": "2",
    "BATON_WORKER__PEAK_TFLOPS": "0.5",
    "BATON_WORKER__PEAK_GB_PER_S": "20",
}
# Metrics that vLLM's own dashboards query.
VLLM_QUERIES = (
    *(
        f"histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket{{model_name=~'.+'}}[5s])))"
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "time_to_first_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
        )
    ),
    *(
        f"rate(vllm:{name}{{model_name=~'.+'}}[5s])"
        for name in (
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum",
            "request_decode_time_seconds_sum",
            "request_inference_time_seconds_sum",
            "num_preemptions_total",
        )
    ),
    "sum by (finished_reason) (increase(vllm:request_success_total{model_name=~'.+'}[5s]))",
    "vllm:num_requests_running{model_name=~'.+'}",
    "vllm:num_requests_waiting{model_name=~'.+'}",
    "vllm:kv_cache_usage_perc{model_name=~'.+'}",
)


@pytest.fixture(scope="module")
def served(lent, tmp_path_factory) -> Iterator[Served]:
    options = ("--launcher", "process", "--prefill", "1", "--decode", "1")
    environment = {"BATON_RUN_DIR": str(tmp_path_factory.mktemp("run")), **SETTINGS, **HANDS_OVER}
    with serve(*options, command=lent, **environment) as running:
        yield running


@pytest.fixture(scope="module")
def scraping(served, tmp_path_factory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(folder, f"{served.url}/metrics/targets") as running:
        yield running


def test_the_shipped_files_are_right():
    rules = [str(path) for path in (SHIPPED / "rules").glob("baton_[ar]*s.yml")]
    for arguments in (
        ("check", "config", "--syntax-only", str(SHIPPED / "prometheus.yml")),
        ("check", "rules", *rules),
        ("test", "rules", str(SHIPPED / "rules" / "baton_alerts_test.yml")),
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_dashboards_alerts_and_lints(served, scraping):
    with Trickle(served.url):
        _all_queries_have_data(scraping)
        _a_killed_worker_is_told(served, scraping)
    complaints = promtool("check", "metrics", stdin=HTTP.get(f"{served.url}/metrics").text).stderr
    # Metric names of vLLM contain a colon, which Prometheus reserves for rules.
    assert not [line for line in complaints.splitlines() if not line.startswith("vllm:")]


def _all_queries_have_data(scraping: Prometheus) -> None:
    queries = [*dashboard_queries(), *(("vLLM", query) for query in VLLM_QUERIES)]

    def have_data() -> bool:
        queries[:] = [(where, query) for where, query in queries if not _numbers(scraping, query)]
        return not queries

    poll_until(have_data, lambda: f"data of {json.dumps(queries, indent=1)}")
    assert "BatonRestart" not in scraping.firing()


def _numbers(scraping: Prometheus, query: str) -> list[float]:
    values = (float(series["value"][1]) for series in scraping.query(query))
    return [value for value in values if value == value]  # removes NaN


def _a_killed_worker_is_told(served: Served, scraping: Prometheus) -> None:
    url, key = find_deployment(None, None, {**os.environ, "BATON_RUN_DIR": served.run_dir})
    with AdminClient(url, key) as admin:
        workers = admin.pools().workers
    victim = next(worker for worker in workers if worker.role == "decode")
    os.kill(victim.pid, signal.SIGKILL)
    poll_until(
        lambda: "BatonRestart" in scraping.firing(),
        lambda: f"an alert fires: {scraping.query('ALERTS')}",
    )
    (alert,) = scraping.query('ALERTS{alertname="BatonRestart",alertstate="firing"}')
    assert alert["metric"]["service"] == victim.worker_id
    assert alert["metric"]["severity"] == "warning"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", alert["metric"]["instance"])
