"""Trace replays in real time, and the search for the highest rate, over loopback."""

import asyncio
import csv
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from aiohttp import web
from typer.testing import CliRunner

from bench import cli
from bench.common.report import from_json
from bench.serve.run import measure

MOONCAKE = [  # milliseconds, prompt tokens, answer tokens, hashes of blocks of 512 tokens
    (0, 600, 3, [7, 8]),
    (120, 520, 2, [7, 9]),
    (120, 30, 1, [11]),
    (450, 512, 4, [7]),
]


class Counter:
    """Streams completions, at most `slots` in parallel, and keeps the prompts in order of
    arrival."""

    def __init__(self, ttft_s=0.0, slots=1000):
        self.prompts = []
        self._ttft_s = ttft_s
        self._slots = asyncio.Semaphore(slots)
        self.app = web.Application(client_max_size=2**26)
        self.app.router.add_get("/health", self._models)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._answer)

    async def _models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "known", "object": "model"}]})

    async def _answer(self, request):
        body = await request.json()
        self.prompts.append(body["prompt"].split())
        num_prompt, num_tokens = len(self.prompts[-1]), body["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self._slots:
            await response.prepare(request)
            await asyncio.sleep(self._ttft_s)
            for _ in range(num_tokens):
                await response.write(event_of([{"index": 0, "text": " word"}]))
            usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
            finished = [{"index": 0, "text": "", "finish_reason": "length"}]
            await response.write(event_of(finished, usage=usage) + b"data: [DONE]\n\n")
        return response


def event_of(choices, **fields):
    event = {"id": "known", "object": "text_completion", "created": 0, "model": "known"}
    return b"data: " + json.dumps(event | {"choices": choices} | fields).encode() + b"\n\n"


@asynccontextmanager
async def serving(server):
    runner = web.AppRunner(server.app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def load(monkeypatch):
    """Runs `bench serve` against a server that lives for one measurement."""

    def run(*options, make=Counter):
        seen = []

        async def served(plan):
            server = make()
            async with serving(server) as url:
                measured = await measure(replace(plan, target=replace(plan.target, url=url)))
            seen.append((server, measured))
            return measured

        monkeypatch.setattr("bench.serve.cli.measure_shown", lambda plan: asyncio.run(served(plan)))
        done = CliRunner().invoke(cli.app, ["serve", "--warmup", "0", *map(str, options)])
        assert done.exit_code == 0, done.output
        return seen, done

    return run


def sent_at_their_times(run):
    """Returns True if the gaps between sent requests equal the planned gaps, apart from delays."""
    left_s = [(one.due_s, one.delay_s, answer.sent_s) for one, answer in run.answered]
    return all(
        later[2] - earlier[2]
        == pytest.approx(later[0] + later[1] - earlier[0] - earlier[1], abs=0.05)
        for earlier, later in pairwise(left_s)
    )


def test_a_mooncake_trace_keeps_its_times_lengths_and_shared_blocks(load, tmp_path):
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.csv"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(names, one, strict=True))) for one in MOONCAKE))
    [(server, measured)], _ = load("--trace", trace, "--csv", rows)
    [run] = measured.runs
    assert [one.due_s for one in run.outcomes] == pytest.approx([0.0, 0.12, 0.12, 0.45])
    assert sent_at_their_times(run)
    assert [(a.num_prompt_tokens, a.num_output_tokens) for a in run.answers] == [
        one[1:3] for one in MOONCAKE
    ]
    by_len = {len(prompt): prompt for prompt in server.prompts}
    assert by_len[600][:512] == by_len[520][:512] == by_len[512]
    assert by_len[600][512:520] != by_len[520][512:]
    assert by_len[30] != by_len[512][:30]
    told = [*csv.DictReader(rows.read_text().splitlines())]
    assert [float(row["due_s"]) for row in told] == [0.0, 0.12, 0.12, 0.45]


def test_a_sweep_finds_what_a_server_of_known_capacity_can_do(load, monkeypatch, tmp_path):
    """Four slots that take 50 ms for each request answer 80 requests a second."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr("bench.serve.cli.SWEEP_STEP_S", 0.25)
    page, report = tmp_path / "page.html", tmp_path / "report.json"
    options = ("--rate", 40, "--requests", 20, "--output-len", 1, "--slo-ttft-ms", 250)
    seen, done = load(
        *("--sweep", "--attainment", 0.8, *options, "--json", report, "--html", page),
        make=lambda: Counter(ttft_s=0.05, slots=4),
    )
    found = from_json(report.read_bytes())
    rates = {
        float(result.name.rpartition("_")[2]): result.value
        for result in found.results
        if result.name.startswith("sweep/attainment_at")
    }
    highest = found.value("sweep/highest_rate")
    assert 10 < highest < 160
    assert any(share < 0.8 for rate, share in rates.items() if rate > highest)
    assert "within bounds: passed" in done.output
    assert "within bounds: failed" in done.output
    assert len(seen) >= len(rates)
    assert "highest that passed" in page.read_text()
