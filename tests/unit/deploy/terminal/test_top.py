"""`baton top`: views, filter, details and orders, with a fake deployment and a fake terminal."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from deploy.admin.client import AdminError
from deploy.admin.schema import (
    ListedRequest,
    PlannerAnswer,
    PlannerInfo,
    PoolsAnswer,
    PreviewAnswer,
    RequestsAnswer,
    StepInfo,
    StoreInfo,
    VersionInfo,
    WorkerInfo,
)
from deploy.pools.workers.record import WorkerState
from deploy.terminal.rows import USAGE, typed_order
from deploy.terminal.top import Confirmation, Top, TopPage
from engine.config import PlannerMode
from engine.control import Pools, RequestInfo, RequestState
from engine.errors import ConfigError
from engine.messages import RequestId, Role, WorkerId
from tests.unit.deploy.commands.test_store import SILENT, STORE

WITHIN_S = 20.0


def worker(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(name),
        version="v1",
        role=role,
        target=role,
        state=WorkerState.SERVING,
        state_s=9.0,
        is_connected=True,
        is_leaving=False,
        failures=0,
        is_crash_looping=False,
        pid=7,
        address="tcp://127.0.0.1:1",
        waiting_seqs=1,
        running_seqs=2,
        leaving_seqs=0,
        open_leases=0,
        num_blocks=100,
        free_blocks=50,
        kernels="avx2",
    )


PLANNER = PlannerInfo(PlannerMode.OFF, ())
VERSION = VersionInfo(
    name="v1",
    model="a/model",
    model_name="model",
    fingerprint="fp",
    wanted=Pools(1, 1),
    serving=Pools(1, 1),
    weight=100,
    num_requests=0,
    is_current=True,
    is_leaving=False,
    missing=None,
    worker={},
)
POOLS = PoolsAnswer(
    wanted=Pools(1, 1),
    versions=[VERSION],
    taking_over=None,
    settled=True,
    version=3,
    max_workers=4,
    workers=[worker("worker-1", Role.DECODE), worker("worker-0", Role.PREFILL)],
    gateways=[],
    planner=PLANNER,
    troubles=(),
    counters={},
    steps=[StepInfo(1, 2.0, "worker-1", "was started", "")],
)
REQUEST = RequestInfo(
    RequestId(5), RequestState.DECODING, 1.0, 10, 20, WorkerId("worker-0"), None, 1, "v1"
)


class FakeDeployment:
    url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.answer = POOLS
        self.error = ""
        self.given: list[tuple[str, object]] = []

    def pools(self) -> PoolsAnswer:
        if self.error:
            raise AdminError(self.error)
        return self.answer

    def requests(self) -> RequestsAnswer:
        return RequestsAnswer(1, [ListedRequest("gateway", REQUEST)])

    def planner(self) -> PlannerAnswer:
        return PlannerAnswer(PLANNER, Pools(1, 1), [])

    def stores(self) -> list[StoreInfo]:
        return [STORE, SILENT]

    def preview(self, path: str, body: object) -> PreviewAnswer:
        if "nobody" in path:
            raise AdminError("no worker is called nobody")
        return PreviewAnswer([], [], PlannerMode.OFF, [f"call {path}"], [])

    def give(self, path: str, body: object) -> PoolsAnswer:
        self.given.append((path, body))
        return self.answer


@pytest.fixture
def deployment() -> FakeDeployment:
    return FakeDeployment()


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Waits for the threads that send requests."""
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await pilot.pause(0.01)


def table(app: Top) -> list[list[str]]:
    found: DataTable[str] = app.screen_stack[0].query_one(DataTable)
    return [[str(cell) for cell in found.get_row_at(i)] for i in range(found.row_count)]


def said(app: Top, name: str) -> str:
    return str(app.screen_stack[0].query_one(name, Static).render())


def page(app: Top) -> str:
    return "\n".join(str(each.render()) for each in app.screen.query(Static))


async def test_views_show_the_deployment(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        assert table(app)[0][:4] == ["worker-1", "v1", "decode", "serving"]
        assert deployment.url in said(app, "#head")
        assert "all as wanted" in said(app, "#head")
        assert not any("store" in cell for row in table(app) for cell in row)
        await pilot.press("1")
        assert table(app)[0] == ["prefill", "1", "1", "0"]
        assert {row[0] for row in table(app)} == {"prefill", "decode", "mixed"}
        await pilot.press("3")
        assert table(app)[0][:2] == ["5", "decoding"]
        await pilot.press("5")
        assert table(app)[0][1:3] == ["worker-1", "was started"]
        await pilot.press("6")
        host, disk, silent = table(app)
        assert host == ["store-v1", "v1", "serving", "host", "3", "75%", "6", "5", "1", ""]
        assert disk[3:] == ["disk", "8", "0%", "2", "5", "1", "EIO"]
        assert silent[2] == "waiting, silent"
        assert silent[-1] == "no memory"
        await pilot.press("enter")
        assert "dropped_blocks:orphan" in page(app)


async def test_filter_keeps_rows_that_contain_a_text(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        await pilot.press("slash", *"PREFILL", "enter")
        assert [row[0] for row in table(app)] == ["worker-0"]
        await pilot.press("slash", *["backspace"] * 7, "enter")
        assert len(table(app)) == 2


async def test_row_is_described(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        await pilot.press("down", "enter")
        assert isinstance(app.screen, TopPage)
        assert "worker-0" in page(app)
        assert "tcp://127.0.0.1:1" in page(app)
        await pilot.press("escape", "question_mark")
        assert "rollback [VERSION]" in page(app)


async def test_order_is_given_only_after_its_preview_is_confirmed(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        for answer in ("enter", "n", "y"):
            await pilot.press("f", "enter")
            await until(pilot, lambda: isinstance(app.screen, Confirmation))
            assert "call /v1/workers/worker-1/flip" in page(app)
            assert deployment.url in page(app)
            assert deployment.given == []
            await pilot.press(answer)
            await until(pilot, lambda: not isinstance(app.screen, Confirmation))
        await until(pilot, lambda: len(deployment.given) == 1)
        assert deployment.given == [("/v1/workers/worker-1/flip", {"role": "prefill"})]
        await until(pilot, lambda: "ordered: flip worker-1 prefill" in said(app, "#says"))


async def test_refused_orders_are_reported(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        for order, answer in (
            ("drain nobody", "no worker is called nobody"),
            ("flip", "write flip"),
        ):
            await pilot.press("colon")
            app.query_one("#line").value = order
            await pilot.press("enter")
            async with asyncio.timeout(WITHIN_S):
                while answer not in said(app, "#says"):
                    await pilot.pause(0.01)


async def test_lost_deployment_keeps_its_last_state_and_comes_back(deployment):
    app = Top(deployment)
    async with app.run_test(size=(140, 30)) as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
        deployment.error = "it does not answer"
        app._ask()
        await until(pilot, lambda: "it does not answer; asking again" in said(app, "#says"))
        assert len(table(app)) == 2
        deployment.error = ""
        deployment.answer = msgspec.structs.replace(POOLS, workers=POOLS.workers[:1])
        app._ask()
        await until(pilot, lambda: len(table(app)) == 1)
        assert "asking again" not in said(app, "#says")


async def test_answer_after_the_end_is_dropped(deployment):
    app = Top(deployment)
    async with app.run_test() as pilot:
        await until(pilot, lambda: len(table(app)) == 2)
    late: list[str] = []
    await asyncio.to_thread(app._in_app, lambda: late.append("the table is gone"))
    assert not late


@pytest.mark.parametrize(
    ("settled", "troubles", "said"),
    [
        (True, (), "all as wanted"),
        (True, ("gateway does not answer.",), "not all is well"),
        (False, ("gateway does not answer.",), "changes are under way"),
    ],
)
def test_pools_with_a_trouble_are_not_said_to_be_as_wanted(settled, troubles, said):
    pools = msgspec.structs.replace(POOLS, settled=settled, troubles=troubles)
    assert pools.state == said


@pytest.mark.parametrize(
    ("text", "path", "body"),
    [
        ("pools prefill=1 decode=2", "/v1/pools", {"prefill": 1, "decode": 2}),
        ("flip worker-1 prefill", "/v1/workers/worker-1/flip", {"role": "prefill"}),
        ("drain  worker-1 ", "/v1/workers/worker-1/drain", None),
        ("stop a/b", "/v1/workers/a%2Fb/stop", None),
        ("planner dry-run", "/v1/planner", {"mode": "dry-run"}),
        ("weight v1=60 v2=40", "/v1/weights", {"weights": {"v1": 60, "v2": 40}}),
        ("finish v2", "/v1/versions/v2/finish", {}),
        ("abort 'my version'", "/v1/versions/my%20version/abort", None),
        ("rollback", "/v1/rollback", {}),
        ("rollback v1", "/v1/rollback", {"name": "v1"}),
    ],
)
def test_orders_are_calls(text, path, body):
    order = typed_order(text)
    assert (order.path, order.body) == (path, body)


@pytest.mark.parametrize("text", ["", "'", "reboot", "flip d0", "pools", "pools two", "drain a b"])
def test_wrong_orders_say_how_they_are_written(text):
    with pytest.raises(ConfigError, match=r"type an order|no order|write "):
        typed_order(text)


def test_each_order_has_an_example():
    assert all(usage.startswith(name) for name, usage in USAGE.items())
