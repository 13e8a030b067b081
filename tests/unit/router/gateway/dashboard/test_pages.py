"""The web pages, requested in this process: files, content policy, keys, state and stream."""

import asyncio
import re

import msgspec
import pytest

from engine.config import DashboardMode
from engine.control import ClusterReport, HistoryStep, WorkerReport
from engine.messages import LoadReport, Role, WorkerId
from router.cluster.learning import MovedKv
from router.gateway.app import app_of, dashboard_of
from router.gateway.background import BackgroundWork
from router.gateway.dashboard.pages import WebPages, load_assets
from router.gateway.dashboard.snapshot import counts_of
from router.machine.requests import Update
from router.port import WorkerStatus
from tests.kits.router.access import key_file
from tests.kits.router.gateway import (
    Connection,
    FakeRouter,
    Never,
    create_parts,
    get,
    make_app,
    post,
    settings_of,
    versions_of,
)
from tests.kits.tree.documents import ROOT

STATIC = ROOT / "router/gateway/dashboard/static"
MESSAGES = [{"role": "user", "content": "yo"}]
NEWS = ClusterReport(
    admin_url="http://127.0.0.1:9",
    settled=True,
    troubles=(),
    max_workers=4,
    planner="off",
    planner_reasons=(),
    taking_over=None,
    versions=[],
    workers=[
        WorkerReport(
            *(WorkerId("p0"), "v1", Role.PREFILL, Role.PREFILL, "serving"),
            is_connected=True,
            is_leaving=False,
            failures=0,
            is_crash_looping=False,
            num_blocks=9,
            leaving_seqs=0,
            since_s=1.0,
        )
    ],
    gateways=[],
    counters={"workers died": 2},
    steps=[HistoryStep(1, 2.0, "p0", "was started", "")],
    decisions=[],
)


@pytest.mark.parametrize("path", ["/", "/dashboard", "/play"])
def test_pages_are_open_and_strict(path, tmp_path):
    reply = get(make_app(FakeRouter(), keys=key_file(tmp_path / "keys", "k")), path)
    assert reply.status == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    again = get(make_app(FakeRouter()), path, if_none_match=reply.headers["etag"])
    assert again.status == 304


@pytest.mark.parametrize("name", sorted(path.name for path in STATIC.glob("*.html")))
def test_pages_name_only_files_that_are_there(name):
    text = (STATIC / name).read_text()
    named = re.findall(r'(?:src|href)="(/assets/[^"]+)"', text)
    assert named
    assert set(named) <= set(load_assets())
    assert "//" not in re.sub(r"<!doctype.*?>", "", text)  # nothing is loaded from other hosts
    assert not re.search(r"\son\w+=|style=", text)


@pytest.mark.parametrize("path", sorted(STATIC.rglob("*.js")), ids=lambda path: path.name)
def test_scripts_insert_data_as_text_only(path):
    if path.name == "uplot.js":
        return
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    for imported in re.findall(r'from "([./\w]+)"', text):
        assert (path.parent / imported).exists()


def test_other_files_are_not_found():
    assert get(make_app(FakeRouter()), "/assets/../pages.py").status == 404
    assert get(make_app(FakeRouter()), "/assets/none.js").status == 404
    assert post(make_app(FakeRouter()), "/dashboard", {}).status == 405


@pytest.mark.parametrize("path", ["/dashboard/state", "/dashboard/events"])
def test_the_state_needs_a_key_that_may_debug(path, tmp_path):
    app = make_app(FakeRouter(), keys=key_file(tmp_path / "keys", "k"))
    assert get(app, path).status == 401
    assert get(app, path, authorization="Bearer k").status == 403


def test_the_state_has_what_ended():
    router = FakeRouter()
    router.statuses[WorkerId("p0")] = WorkerStatus(
        Role.PREFILL, LoadReport(1, 2, 3, 4, 5, 6, 7, 8, {"fallbacks:x": 2.0}), 0, 0, num_blocks=16
    )
    router.severed_pairs.append((WorkerId("p0"), WorkerId("d0")))
    router.moved.append(MovedKv(WorkerId("p0"), WorkerId("d0"), 1, 4096))
    app = make_app(router, slo_ttft_s=0.05)
    post(app, "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES})
    state = get(app, "/dashboard/state").json()
    (request,) = state["requests"]
    assert (request["outcome"], request["answer_tokens"]) == ("finished", 3)
    assert request["missed"] == "prefill_compute"
    assert request["timeline"]["prefill_worker"] == "p0"
    (worker,) = state["workers"]
    blocks = worker["blocks"]
    assert (blocks["total"], blocks["lost"]) == (16, 1)
    assert sum(blocks.values()) == 2 * blocks["total"]  # the sum includes lost blocks
    assert state["health"]["level"] == "warn"
    assert "wanted workers are unknown" in state["health"]["reasons"]
    assert state["severed"] == [{"source": "p0", "sink": "d0", "again_in_s": 3.0}]
    assert state["counts"][0] == {
        "where": "workers",
        "event": "fallbacks",
        "reason": "x",
        "number": 2.0,
        "is_trouble": True,
    }
    assert state["transfers"][0]["num_bytes"] == 4096
    assert state["totals"]["missed"] == {"prefill_compute": 1}
    (version,) = state["versions"]
    assert (version["ended"], version["failed"], version["late"]) == (1, 0, 1)
    assert state["cluster"] is None
    assert not state["can_order"]


def test_counts_tell_trouble_from_ordinary_events():
    counts = counts_of(
        {
            ("placed", "least TTFT"): 9,
            ("ended", "finished"): 9,
            ("ended", "failed"): 1,
            ("retried", "worker lost"): 2,
        },
        [],
        msgspec.structs.replace(NEWS, counters={"flips": 3}),
    )
    assert [(each.event, each.reason) for each in counts if each.is_trouble] == [
        ("retried", "worker lost"),
        ("ended", "failed"),
    ]
    assert not counts[-1].is_trouble


def test_a_running_request_is_reported_with_its_stages():
    async def check():
        router = FakeRouter([Update(token_ids=(104,)), Never()])
        own = parts(router)
        dashboard = dashboard_of(own)
        body = msgspec.json.encode({"model": "tiny", "messages": MESSAGES})
        app = app_of(own)
        head = {"x-request-id": "mine", "content-type": "application/json"}
        connection = Connection(app, "POST", "/v1/chat/completions", head)
        connection.put_body(body)
        answering = asyncio.create_task(connection.run())
        await router.waiting.wait()
        (running,) = dashboard.state().running
        assert (running.id, running.request_id) == ("mine", router.requests[0].request_id)
        assert (running.answer_tokens, running.timeline.prefill_worker) == (1, "p0")
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        assert not dashboard.state().running

    asyncio.run(check())


def parts(router, **settings):
    return create_parts(versions_of(router), clock=router.clock, settings=settings_of(**settings))


def test_the_stream_begins_with_all_and_goes_on_with_what_is_new():
    async def check():
        dashboard = dashboard_of(parts(FakeRouter()))
        dashboard._board.cluster = NEWS
        await dashboard.tick()
        connection = Connection(
            WebPages(dashboard, takes_orders=True), "GET", "/dashboard/events", {}
        )
        running = asyncio.create_task(connection.run())
        for _ in range(20):  # passes of the event loop until the stream has begun
            await asyncio.sleep(0)
        await dashboard.tick()
        dashboard._board.cluster = msgspec.structs.replace(NEWS, settled=False)
        await dashboard.tick()
        await dashboard.close(1.0)
        return await running

    reply = asyncio.run(check())
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split(b"\ndata: ") for frame in reply.body.strip().split(b"\n\n")]
    assert [name for name, _ in frames] == [b"event: state", b"event: tick", b"event: tick"]
    whole, first, second = (msgspec.json.decode(data) for _, data in frames)
    assert whole["cluster"]["steps"][0]["what"] == "was started"
    assert whole["can_order"]
    (died,) = (each for each in whole["counts"] if each["event"] == "workers died")
    assert (died["where"], died["number"], died["is_trouble"]) == ("pools", 2, True)
    assert "cluster" not in first
    assert second["cluster"]["settled"] is False
    assert [each["number"] for each in first["samples"]] == [2]


def test_the_dashboard_can_be_read_only_or_off():
    reads = make_app(FakeRouter(), dashboard=DashboardMode.READ_ONLY)
    assert get(reads, "/dashboard").status == 200
    assert post(reads, "/dashboard/orders/v1/pools", {}).status == 403
    off = make_app(FakeRouter(), dashboard=DashboardMode.OFF)
    assert [get(off, path).status for path in ("/", "/dashboard", "/play")] == [404] * 3
    assert get(off, "/docs").status == 200
    assert b'href="./"' in get(reads, "/docs").body
    assert b'href="./"' not in get(off, "/docs").body


def test_orders_need_the_admin_key_and_a_controller():
    app = make_app(FakeRouter())
    assert post(app, "/dashboard/orders/v1/pools", {}).status == 401
    assert post(app, "/dashboard/orders/v1/pools", {}, x_baton_admin_key="k").status == 503
    assert post(app, "/dashboard/orders/v1/block-events", {}, x_baton_admin_key="k").status == 404


def test_the_background_ends_its_streams():
    async def check():
        dashboard, work = dashboard_of(parts(FakeRouter())), BackgroundWork()
        work.add(dashboard)
        await work.open()
        work.stop_draining()
        await work.close(1.0)

    asyncio.run(check())


class FakeSiblings:
    """Another gateway process, whose answer a test sets."""

    process = "0"

    def __init__(self, *others):
        self.answers = {}
        self.others = others

    async def ask_for(self, question):
        return [other.answers[question]() for other in self.others] + [b"no answer"]


def test_processes_that_share_the_port_are_shown_together():
    async def check():
        other = FakeSiblings()
        other.process = "1"
        far = parts(FakeRouter())
        dashboard_of(far, siblings=other)
        near = dashboard_of(parts(FakeRouter()), siblings=FakeSiblings(other))
        far.recent.sample(1.0, queue=2, in_flight=3, answer_tokens=4)
        whole = msgspec.json.decode(await near.encoded())
        (part,) = whole["others"]
        assert (whole["process"], part["process"], part["queue"]) == ("0", "1", 7)
        assert [each["number"] for each in part["samples"]] == [1]
        far.recent.sample(2.0, queue=2, in_flight=3, answer_tokens=4)
        (new,) = await near._ask_others()
        assert [each.number for each in new.samples] == [2]
        (known,) = near._others.whole
        assert [each.number for each in known.samples] == [1, 2]

    asyncio.run(check())
