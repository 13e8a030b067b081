"""The load generator over loopback, against a server whose answers are all known."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from typer.testing import CliRunner

from bench import cli
from bench.client.answers import Answer, Endpoint, Failure
from bench.client.load import RequestsFailed, SloBounds, figures_of_runs
from bench.common.report import from_json
from bench.serve.lengths import TalkShape, fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.processes import measure_shown
from bench.serve.run import measure, run_open_loop
from engine.clock import MonotonicClock


def sse(chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class FakeServer:
    """Streams `max_tokens` tokens; `fault` names the error that the server makes."""

    def __init__(self, fault=None):
        self.fault = fault
        self.bodies = []
        self.closed = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_post("/v1/completions", self.answer)
        self.app.router.add_post("/v1/chat/completions", self.answer)

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})

    async def answer(self, request):
        body = await request.json()
        self.bodies.append((request.path, dict(request.headers), body))
        if self.fault == "busy" or (self.fault == "busy later" and len(self.bodies) > 3):
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        return await self.stream(request, body)

    async def stream(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            await response.write(sse({"choices": [{"text": "x", "delta": {"content": "x"}}]}))
            if token == 1 and self.fault == "hangs":
                await self.closed.wait()
            if token == 1 and self.fault == "dies":
                request.transport.abort()
                return response
            if token == 1 and self.fault == "errs":
                await response.write(sse({"error": {"message": "oh no"}}))
        await response.write(sse(self.last_chunk(body)))
        await response.write(b"data: [DONE]\n\n")
        return response

    def last_chunk(self, body):
        prompt = body.get("prompt") or body["messages"][0]["content"]
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
        return {"choices": [], "usage": counts, "baton_timeline": {"queue": 0.25}}


@asynccontextmanager
async def serving(fault=None):
    server = FakeServer(fault)
    runner = web.AppRunner(server.app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.closed.set()
        await runner.cleanup()


def plan_for(url, **target):
    return ServePlan(
        target=ServeTarget(url, **target),
        load=ServeLoad(rate_per_s=200.0, num_requests=6, num_warmup=2),
        ask=ServeAsk(input_len=fixed(12), output_len=fixed(5)),
        slo=SloBounds(ttft_s=10.0, tpot_s=10.0),
    )


def measure_against(fault=None, change=lambda plan: plan, **target):
    async def go():
        async with serving(fault) as (server, url):
            return server, await measure(change(plan_for(url, **target)))

    return asyncio.run(go())


def test_every_request_is_sent_streamed_and_counted():
    server, measured = measure_against()
    [run] = measured.runs
    [figures] = figures_of_runs(measured.runs, SloBounds(ttft_s=10.0))
    assert measured.model == "fake"
    assert len(server.bodies) == 8
    assert all(isinstance(outcome.result, Answer) for outcome in run.outcomes)
    assert {(a.num_prompt_tokens, a.num_output_tokens) for a in run.answers} == {(12, 5)}
    assert figures["timeline/queue"].value == 250
    assert figures["goodput/attainment"].value == 1
    assert all(0 < a.ttft_s <= a.e2e_s < run.duration_s for a in run.answers)


def test_repetitions_send_prompts_of_their_own():
    def change(plan):
        return replace(plan, load=replace(plan.load, num_repeats=2))

    server, measured = measure_against(change=change)
    assert [len(run.answers) for run in measured.runs] == [6, 6]
    assert len({body["prompt"] for _, _, body in server.bodies}) == 14


def test_a_concurrency_limit_is_reached_and_held():
    running = []
    most_running = []

    async def go():
        pair = asyncio.Barrier(2)

        async def send(body):
            running.append(body)
            most_running.append(len(running))
            await asyncio.wait_for(pair.wait(), timeout=5)
            running.remove(body)
            return Failure("timeout", "")

        bodies = [b"%d" % number for number in range(6)]
        return await run_open_loop(
            send, bodies, [0.0] * 6, clock=MonotonicClock(), concurrency_limit=2
        )

    run = asyncio.run(go())
    assert max(most_running) == 2
    assert sum(outcome.slot_wait_s > 0 for outcome in run.outcomes) >= 4


def test_some_failures_are_counted_and_the_rest_is_measured():
    _, measured = measure_against("busy later")
    [run] = measured.runs
    assert len(run.answers) == 1
    assert {failure.kind for failure in run.failures} == {"http_429"}
    assert "too busy" in run.failures[0].detail


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("busy", "http_429"), ("dies", "truncated"), ("errs", "stream_error"), ("hangs", "timeout")],
)
def test_each_failure_has_its_kind(fault, kind):
    with pytest.raises(RequestsFailed, match="all 2 warm-up requests failed") as caught:
        measure_against(fault, timeout_s=0.3)
    assert {failure.kind for failure in caught.value.failures} == {kind}


def test_a_connection_refused_after_the_start_is_counted_as_such():
    async def go():
        async with serving() as (_, url):
            pass
        await measure(plan_for(url, model="given"))

    with pytest.raises(RequestsFailed) as caught:
        asyncio.run(go())
    assert {failure.kind for failure in caught.value.failures} == {"connection"}


def test_a_slow_answer_never_delays_the_next_request():
    """The server answers only after it has got all requests: a closed loop would never end."""

    async def go():
        all_sent = asyncio.Event()
        sent = []

        async def send(body):
            sent.append(body)
            if len(sent) == 5:
                all_sent.set()
            await asyncio.wait_for(all_sent.wait(), timeout=5)
            return Failure("timeout", "")

        bodies = [b"%d" % number for number in range(5)]
        due_s = [0.0, 0.01, 0.01, 0.02, 0.03]
        return sent, await run_open_loop(send, bodies, due_s, clock=MonotonicClock())

    sent, run = asyncio.run(go())
    assert sent == [b"0", b"1", b"2", b"3", b"4"]
    assert run.duration_s >= 0.03


class JumpingClock:
    """A clock that advances only when the test advances it."""

    def __init__(self):
        self.at_s = 100.0

    def now_s(self):
        return self.at_s


def test_a_late_client_sends_at_once_and_records_how_late_it_was():
    clock = JumpingClock()

    async def send(body):
        clock.at_s += 0.5
        return Failure("timeout", "")

    run = asyncio.run(run_open_loop(send, [b"a", b"b"], [0.0, 0.01], clock=clock))
    assert [outcome.send_lag_s for outcome in run.outcomes] == [0.0, pytest.approx(0.49)]


@pytest.fixture
def command(monkeypatch):
    """Runs `bench serve` against a fake server that lives until the command ends."""

    def run(*options, fault=None):
        async def served(plan):
            async with serving(fault) as (_, url):
                return await measure(replace(plan, target=replace(plan.target, url=url)))

        monkeypatch.setattr("bench.serve.cli.measure_shown", lambda plan: asyncio.run(served(plan)))
        load = ("--requests", "4", "--rate", "inf", "--input-len", "8", "--output-len", "3")
        return CliRunner().invoke(cli.app, ["serve", *load, *options])

    return run


def test_the_command_prints_tables_and_writes_the_report(command, tmp_path):
    path = tmp_path / "made" / "serve.json"
    done = command("--repeat", "3", "--slo-ttft-ms", "5000", "--json", str(path))
    assert done.exit_code == 0, done.output
    for shown in ("ttft", "itl", "throughput/output_tokens", "goodput/attainment", "queue"):
        assert shown in done.output
    report = from_json(path.read_bytes())
    throughput = next(r for r in report.results if r.name == "throughput/requests")
    assert len(throughput.runs) == 3
    assert report.value("requests/completed") == 4
    assert report.config["model"] == "fake"
    assert report.hardware.num_cores >= 1


def test_the_command_ends_with_one_line_when_no_server_is_there():
    done = CliRunner().invoke(cli.app, ["serve", "--url", "http://127.0.0.1:1", "--quick"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no OpenAI-compatible server at http://127.0.0.1:1")
    assert done.stderr.count("\n") == 1


def test_the_command_draws_its_distributions(command, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path = tmp_path / "made" / "cdf.png"
    page, rows = tmp_path / "load.html", tmp_path / "load.csv"
    done = command("--plot", str(path), "--html", str(page), "--csv", str(rows))
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "The slowest" in page.read_text()
    assert len(rows.read_text().splitlines()) == 5


def test_sessions_send_answers_along_and_wait_for_them():
    def change(plan):
        load = replace(plan.load, num_requests=6)
        return replace(plan, load=load, talk=TalkShape(turns=fixed(3), think_s=0.01))

    server, measured = measure_against(change=change, endpoint=Endpoint.CHAT)
    [run] = measured.runs
    talks = [body["messages"] for _, _, body in server.bodies[2:]]
    assert sorted(len(messages) for messages in talks) == [1, 1, 3, 3, 5, 5]
    assert all(one["content"] == "xxxxx" for messages in talks for one in messages[1::2])
    assert sorted((one.session, one.turn) for one in run.outcomes) == [
        (session, turn) for session in range(2) for turn in range(3)
    ]


def test_a_closed_loop_keeps_its_clients_busy():
    def change(plan):
        return replace(plan, load=replace(plan.load, clients=2))

    _, measured = measure_against(change=change)
    [run] = measured.runs
    assert len(run.answers) == 6
    ends = [one.due_s + answer.e2e_s for one, answer in run.answered]
    assert max(one.due_s for one in run.outcomes) >= min(ends)


def test_two_processes_share_one_load():
    async def go():
        async with serving() as (server, url):
            plan = plan_for(url)
            plan = replace(plan, load=replace(plan.load, num_processes=2, num_requests=10))
            return server, await asyncio.to_thread(measure_shown, plan)

    server, measured = asyncio.run(go())
    [run] = measured.runs
    assert len(run.answers) == 10
    assert len(server.bodies) == 12
    assert run.cost.cpu_s > 0
    assert [one.session for one in run.outcomes] == sorted(one.session for one in run.outcomes)
