"""/metrics of gateway processes that share one port."""

from engine.messages import LoadReport, Role, WorkerId
from router.gateway.metrics.families import decode_metrics, encode_metrics
from router.gateway.metrics.meters import ChoiceMeter, GatewayMetrics, RequestMeter
from router.port import WorkerStatus
from tests.kits.router.gateway import LENGTH, FakeRouter, tokens, versions_of


def lines(page: bytes, name: str) -> list[str]:
    return [line for line in page.decode().splitlines() if line.startswith(name)]


def counted(process: str | None, num_requests: int) -> GatewayMetrics:
    router = FakeRouter([tokens("ab", outcome=LENGTH)])
    load = LoadReport(1, 0, 0, 0, 0, waiting_seqs=2, running_seqs=3, open_leases=0)
    router.statuses[WorkerId("m0")] = WorkerStatus(Role.MIXED, load, 0, 0)
    metrics = GatewayMetrics(versions_of(router, model_names=("m",)), version="1", process=process)
    for _ in range(num_requests):
        with RequestMeter(metrics) as meter:
            ChoiceMeter(meter, 0).tokens(2, 1.0)
    return metrics


def test_process_counts_are_labelled_and_shared_metrics_come_once():
    first, second = counted("0", 1), counted("1", 3)
    page = first.exposition([decode_metrics(encode_metrics(second.own()))])
    assert lines(page, "baton_generation_tokens_total") == [
        'baton_generation_tokens_total{process="0"} 2.0',
        'baton_generation_tokens_total{process="1"} 6.0',
    ]
    assert lines(page, "baton_gateway_processes") == ["baton_gateway_processes 2.0"]
    assert lines(page, "vllm:generation_tokens_total") == [
        'vllm:generation_tokens_total{model_name="m",process="0"} 2.0',
        'vllm:generation_tokens_total{model_name="m",process="1"} 6.0',
    ]
    assert len(lines(page, "baton_worker_running_seqs")) == 1
    assert lines(page, "vllm:num_requests_running") == [
        'vllm:num_requests_running{model_name="m"} 3.0'
    ]
    # Seven requests wait in each gateway, and two in the worker that both gateways see.
    assert lines(page, "vllm:num_requests_waiting") == [
        'vllm:num_requests_waiting{model_name="m"} 16.0'
    ]
    series = [line.rpartition(" ")[0] for line in page.decode().splitlines() if line[0] != "#"]
    assert len(set(series)) == len(series)


def test_a_process_alone_has_no_label_and_no_others():
    page = counted(None, 1).exposition()
    assert lines(page, "baton_generation_tokens_total") == ["baton_generation_tokens_total 2.0"]
    assert not lines(page, "baton_gateway_processes")
