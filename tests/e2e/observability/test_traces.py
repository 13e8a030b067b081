"""A gateway writes an access log, and sends its traces to a collector over OTLP."""

import gzip
import http.server
import json
import queue
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from engine.config import Config, GatewayConfig, LogFormat, LogsConfig, PoolsConfig
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import HTTP

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def collector():
    """Runs a small OTLP receiver. Yields its URL and the received requests."""
    got = queue.Queue()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            got.put((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_is_a_trace_and_a_line(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    url, got = collector
    access = tmp_path / "access.log"
    config = Config(
        gateway=GatewayConfig(port=0, trace_endpoint=url, trace_share=0.0),
        pools=PoolsConfig(mixed=1),
        logs=LogsConfig(format=LogFormat.JSON, access=str(access)),
    )
    running = Deployment(NullWorkers(NURSERY), model=BUNDLED_MODEL, config=config)
    ready = running.open()
    try:
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "mine"}
        body = {"model": ready.model_name, "prompt": "yo", "max_tokens": 4, "ignore_eos": True}
        asked = HTTP.post(f"{ready.url}/v1/completions", json=body, headers=headers, timeout=30)
    finally:
        running.close()  # the close sends the remaining spans
    assert asked.status_code == 200
    assert asked.headers["traceparent"].startswith(f"00-{TRACE}-")
    path, request = got.get(timeout=10)
    assert path == "/v1/traces"
    [resource] = request.resource_spans
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert {"cmpl", "route", "queue", "prefill", "decode"} <= set(spans)
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in spans.values())
    [line] = [json.loads(text) for text in access.read_text().splitlines()]
    assert (line["status"], line["request_id"], line["process"]) == (200, "mine", "gateway")
    assert line["completion_tokens"] == 4
