"""Batches from input file to results, run by an application with a computing router."""

import asyncio
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.messages import RequestId, WorkerId
from router.gateway.batches import runner as runner_module
from router.gateway.batches import tables
from router.gateway.storage import Storage
from router.gateway.versions import Versions
from router.machine.requests import Failed, Rejected, Update
from tests.kits.router.batches import (
    IDLE,
    ComputingRouter,
    batch_app,
    create,
    ended,
    file_of,
    line_of,
    lines_in,
    texts_in,
    until,
    upload,
)
from tests.kits.router.gateway import FakeRouter, Never, answer, fetch


class FirstAnswers(FakeRouter):
    """A router that answers the first request. All other requests never finish."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses = {WorkerId("m0"): IDLE}

    def _script_of(self, number: int) -> Any:
        return [Never()] if number else answer("yes")

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Does nothing: the requests keep waiting."""


LINES = [line_of(f"r{i}") for i in range(7)]
METRIC = "baton_batch_results_total"


async def run(app: Any, *lines: Any, **fields: Any) -> Any:
    """Uploads lines, creates a batch and waits until it has ended."""
    batch = await create(app, await upload(app, file_of(*lines)), **fields)
    return await ended(app, batch["id"])


async def test_a_batch_answers_every_line_in_the_order_of_the_file() -> None:
    async with batch_app(ComputingRouter()) as app:
        batch = await run(app, *LINES, metadata={"a": "b"})
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 7, "completed": 7, "failed": 0}
        assert batch["metadata"] == {"a": "b"}
        assert batch["error_file_id"] is None
        assert batch["errors"] is None
        assert batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"]
        lines = await lines_in(app, batch["output_file_id"])
        assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(7)]
        for line in lines:
            body = line["response"]["body"]
            assert line["response"]["status_code"] == 200
            assert line["response"]["request_id"] == body["id"]
            assert body["usage"]["completion_tokens"] == 5
        shown = (await fetch(app, "GET", f"/v1/files/{batch['output_file_id']}")).json()
        assert shown["purpose"] == "batch_output"


async def test_batches_of_chats_and_of_responses_are_answered_too() -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "yo"}], "max_tokens": 4},
        "/v1/responses": {"input": "yo", "max_output_tokens": 16},
    }
    async with batch_app(ComputingRouter()) as app:
        for url, body in bodies.items():
            lines = [
                line_of("good") | {"url": url, "body": {"model": "tiny", **body}},
                line_of("bad") | {"url": url, "body": {"model": "tiny", **body, "top_p": 7}},
                line_of("later") | {"url": url, "body": {**body, "background": True}},
            ]
            batch = await run(app, *lines, endpoint=url)
            good, *_ = await lines_in(app, batch["output_file_id"])
            assert good["custom_id"] == "good"
            assert good["response"]["request_id"] == good["response"]["body"]["id"]
            errors = await lines_in(app, batch["error_file_id"])
            params = [line["response"]["body"]["error"]["param"] for line in errors]
            assert params == (["top_p", "background"] if "responses" in url else ["top_p"])


async def test_a_request_of_a_client_gets_the_same_answer() -> None:
    async with batch_app(ComputingRouter()) as app:
        batch = await run(app, line_of("same", seed=5))
        [(_, text)] = await texts_in(app, batch["output_file_id"])
        body = msgspec.json.encode(line_of("same", seed=5)["body"])
        reply = await fetch(app, "POST", "/v1/completions", body)
        assert reply.json()["choices"][0]["text"] == text


async def test_a_line_without_a_seed_has_the_same_answer_again() -> None:
    async with batch_app(ComputingRouter()) as app:
        file_id = await upload(app, file_of(line_of("a"), line_of("b", prompt="a")))
        batch = await ended(app, (await create(app, file_id))["id"])
        texts = await texts_in(app, batch["output_file_id"])
        assert texts[0][1] != texts[1][1]


async def test_refused_requests_are_in_the_error_file() -> None:
    async with batch_app(ComputingRouter()) as app:
        batch = await run(
            app, line_of("good"), line_of("bad", temperature=-1), line_of("none", model="x")
        )
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        bad, none = await lines_in(app, batch["error_file_id"])
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert (none["custom_id"], none["response"]["status_code"]) == ("none", 404)


async def test_wrong_lines_fail_the_batch_with_their_numbers() -> None:
    wrong = [line_of("a"), "text", line_of("a"), line_of("b") | {"url": "/v1/x"}]
    router = ComputingRouter()
    async with batch_app(router) as app:
        data = b"\n" + file_of(*wrong)
        batch = await ended(app, (await create(app, await upload(app, data)))["id"])
        assert batch["status"] == "failed"
        assert batch["failed_at"] is not None
        found = [(fault["line"], fault["code"]) for fault in batch["errors"]["data"]]
        assert found == [
            (3, "invalid_request"),
            (4, "duplicate_custom_id"),
            (5, "mismatched_endpoint"),
        ]
        assert not router.requests


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"x" * 100, "invalid_json_line")],
)
async def test_files_without_requests_fail(data: bytes, code: str) -> None:
    async with batch_app(ComputingRouter()) as app:
        batch = await ended(app, (await create(app, await upload(app, data)))["id"])
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == code


async def test_long_files_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SLICE_LINES", 3)
    monkeypatch.setattr(tables, "SLICE_BYTES", 100)
    monkeypatch.setattr("router.gateway.batches.pages.PIECE_BYTES", 64)
    monkeypatch.setattr(runner_module, "PAGE_LINES", 2)
    async with batch_app(ComputingRouter()) as app:
        batch = await run(app, *(line_of(f"r{i}") for i in range(20)))
        assert batch["request_counts"]["completed"] == 20
        found = await texts_in(app, batch["output_file_id"])
        assert [name for name, _ in found] == [f"r{i}" for i in range(20)]


async def test_too_many_lines_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_LINES", 3)
    async with batch_app(ComputingRouter()) as app:
        batch = await run(app, *LINES)
        assert batch["errors"]["data"][0]["code"] == "too_many_tasks"


# ---------------------------------------------------------------- clients have priority


async def test_a_client_pauses_a_batch_within_its_call_and_gets_its_answer_first() -> None:
    router = ComputingRouter(is_quick=False)
    async with batch_app(router, batch_idle_s=0.0) as app:
        made = await create(app, await upload(app, file_of(*LINES)))
        await until(lambda: len(router.running) == 4)
        router.step()
        body = msgspec.json.encode(line_of("client", max_tokens=2)["body"])
        reply = asyncio.ensure_future(fetch(app, "POST", "/v1/completions", body))
        await until(lambda: len(router.requests) == 5)
        assert router.num_withdrawn == 4
        assert [each.is_background for each in router.requests] == [True] * 4 + [False]
        assert list(router.running) == [router.requests[-1].request_id]
        router.step()
        await asyncio.sleep(0.06)  # the runner checks the load during this time
        assert len(router.running) == 1
        router.step()
        assert (await reply).status == 200
        router.is_quick = True
        router.step()  # a step for requests that are already running
        batch = await ended(app, made["id"])
        assert batch["request_counts"]["completed"] == 7
        metrics = (await fetch(app, "GET", "/metrics")).body.decode()
        assert "baton_batch_pauses_total 4.0" in metrics
        assert f'{METRIC}{{outcome="completed"}} 7.0' in metrics
        assert 'baton_requests_total{outcome="finished"} 1.0' in metrics


async def test_a_share_goes_on_beside_clients() -> None:
    router = ComputingRouter(is_quick=False)
    async with batch_app(router, batch_share=0.5, batch_idle_s=0.0) as app:
        await create(app, await upload(app, file_of(*LINES)))
        await until(lambda: len(router.running) == 4)
        body = msgspec.json.encode(line_of("client")["body"])
        reply = asyncio.ensure_future(fetch(app, "POST", "/v1/completions", body))
        await until(lambda: len(router.requests) == 5)
        assert len(router.running) == 3
        router.is_quick = True
        while not reply.done():
            router.step()
            await asyncio.sleep(0)


async def test_a_batch_waits_for_workers_and_for_other_gateways() -> None:
    router = ComputingRouter()
    router.statuses = {WorkerId("m0"): replace(IDLE, num_foreign=1)}
    async with batch_app(router, batch_idle_s=0.0) as app:
        made = await create(app, await upload(app, file_of(*LINES)))
        await asyncio.sleep(0.1)
        assert not router.requests
        router.statuses = {WorkerId("m0"): IDLE}
        assert (await ended(app, made["id"]))["status"] == "completed"


async def test_tenants_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "store"
    async with batch_app(ComputingRouter(), Storage(path), runs=False) as app:
        batches = [await create(app, await upload(app, file_of(*LINES))) for _ in range(3)]
    storage = Storage(path)
    of_bob = "UPDATE batches SET tenant = 'bob' WHERE id = ?"
    await storage.run(lambda connection: connection.execute(of_bob, (batches[2]["id"],)))
    router = ComputingRouter(is_quick=False)
    router.statuses = {WorkerId("m0"): replace(IDLE, max_running=6)}
    async with batch_app(router, storage, batch_idle_s=0.0):
        await until(lambda: len(router.requests) == 6)
        tenants = [request.tenant for request in router.requests]
        assert abs(tenants.count("batch bob") - tenants.count("batch ")) <= 2


# ---------------------------------------------------------------- refusals, limits, ends


@pytest.mark.parametrize("outcome", [Rejected("full", 0.0), Failed("no", code="overloaded")])
async def test_what_says_try_again_is_tried_again(
    outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "retry_after_s", lambda *_: 0.01)
    router = FakeRouter([Update(outcome=outcome)], [Update(outcome=outcome)], answer("yes"))
    router.statuses = {WorkerId("m0"): IDLE}
    async with batch_app(router) as app:
        batch = await run(app, line_of("a"))
        assert await texts_in(app, batch["output_file_id"]) == [("a", "yes")]
        metrics = (await fetch(app, "GET", "/metrics")).body.decode()
        assert f'{METRIC}{{outcome="retried"}} 2.0' in metrics


async def test_a_request_that_workers_do_not_survive_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "retry_after_s", lambda *_: 0.0)
    router = FakeRouter([Update(outcome=Failed("the workers died"))])
    router.statuses = {WorkerId("m0"): IDLE}
    async with batch_app(router) as app:
        batch = await run(app, line_of("a"))
        assert len(router.requests) == runner_module.MAX_LOST
        [line] = await lines_in(app, batch["error_file_id"])
        assert line["response"]["status_code"] == 503


async def test_a_bug_concerns_its_line_alone() -> None:
    router = FakeRouter([ValueError("a bug")], answer("fine"))
    router.statuses = {WorkerId("m0"): IDLE}
    async with batch_app(router) as app:
        batch = await run(app, line_of("a"), line_of("b"))
        [line] = await lines_in(app, batch["error_file_id"])
        assert line["response"]["status_code"] == 500
        assert await texts_in(app, batch["output_file_id"]) == [("b", "fine")]


async def test_a_bug_that_one_batch_meets_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validate = tables.validate_slice
    stuck: list[str] = []

    def broken(connection: sqlite3.Connection, *, batch_id: str, **rest: Any) -> Any:
        if batch_id in stuck:
            raise ValueError("a bug")
        return validate(connection, batch_id=batch_id, **rest)

    monkeypatch.setattr(tables, "validate_slice", broken)
    async with batch_app(ComputingRouter()) as app:
        with pytest.MonkeyPatch.context() as late:
            late.setattr(tables, "validate_slice", lambda *_, **__: 1 / 0)
            stuck.append((await create(app, await upload(app, file_of(*LINES))))["id"])
        batch = await run(app, line_of("a"))
        assert batch["status"] == "completed"
        assert 'baton_batch_events_total{event="bug"}' in await shown_metrics(app)


async def shown_metrics(app: Any) -> str:
    return (await fetch(app, "GET", "/metrics")).body.decode()


async def test_a_cancelled_batch_keeps_its_answers() -> None:
    router = FirstAnswers()
    async with batch_app(router) as app:
        made = await create(app, await upload(app, file_of(*LINES)))
        path = f"/v1/batches/{made['id']}"
        await router.waiting.wait()
        await until_shown(app, 'completed"} 1.0')
        reply = await fetch(app, "POST", f"{path}/cancel")
        assert reply.json()["status"] == "cancelling"
        batch = await ended(app, made["id"])
        assert batch["status"] == "cancelled"
        assert await texts_in(app, batch["output_file_id"]) == [("r0", "yes")]
        left = await lines_in(app, batch["error_file_id"])
        assert [line["custom_id"] for line in left] == [f"r{i}" for i in range(1, 7)]
        assert {line["error"]["code"] for line in left} == {"batch_cancelled"}
        assert router.live == 0
        reply = await fetch(app, "POST", f"{path}/cancel")
        assert reply.status == 409


async def test_an_expired_batch_keeps_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    router = FirstAnswers()
    async with batch_app(router) as app:
        made = await create(app, await upload(app, file_of(*LINES)), completion_window="1s")
        batch = await ended(app, made["id"])
        assert batch["status"] == "expired"
        assert batch["expired_at"] is not None
        assert await texts_in(app, batch["output_file_id"]) == [("r0", "yes")]
        left = await lines_in(app, batch["error_file_id"])
        assert {line["error"]["code"] for line in left} == {"batch_expired"}


async def test_a_batch_whose_file_is_deleted_at_once_fails_or_has_read_it() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        file_id = await upload(app, file_of(*LINES))
        assert (await fetch(app, "DELETE", f"/v1/files/{file_id}")).json()["deleted"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1d"}
        reply = await fetch(app, "POST", "/v1/batches", msgspec.json.encode(body))
        assert reply.status == 404


async def test_a_version_that_leaves_gives_its_paused_requests_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = ComputingRouter(is_quick=False)
    async with batch_app(router, batch_idle_s=0.0) as app:
        made = await create(app, await upload(app, file_of(*LINES)))
        await until(lambda: len(router.running) == 4)
        router.statuses = {}  # no worker has a place any longer
        await until(lambda: not router.running)
        takes = Versions.takes
        monkeypatch.setattr(Versions, "takes", lambda *_: False)
        await until_shown(app, 'started again"} 4.0')
        monkeypatch.setattr(Versions, "takes", takes)
        router.is_quick, router.statuses = True, {WorkerId("m0"): IDLE}
        batch = await ended(app, made["id"])
        assert batch["request_counts"]["completed"] == 7


async def until_shown(app: Any, text: str) -> None:
    """Waits until the metrics show these counts of results."""
    async with asyncio.timeout(10):
        while True:
            page = (await fetch(app, "GET", "/metrics")).body.decode()
            if f'{METRIC}{{outcome="{text}' in page:
                return
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------- killed processes


class Crashed(sqlite3.OperationalError):
    """Signals that the process was killed."""


class CrashingStorage(Storage):
    """Runs `num` transactions.

    The next one is done completely or not at all; then the storage fails.
    """

    def __init__(self, path: Path, num_left: int, *, is_done: bool) -> None:
        super().__init__(path)
        self.num_left = num_left
        self._is_done = is_done
        self.crashed = asyncio.Event()

    async def run(self, work: Callable[..., Any], **given: Any) -> Any:
        if self.crashed.is_set():
            raise Crashed
        self.num_left -= 1
        if self.num_left >= 0:
            return await super().run(work, **given)
        self.crashed.set()
        if self._is_done:
            await super().run(work, **given)
        raise Crashed


async def _begun(path: Path, router: FakeRouter) -> str:
    async with batch_app(router, Storage(path), runs=False) as app:
        return (await create(app, await upload(app, file_of(*LINES[:4], line_of("x", n=-1)))))["id"]


async def _results(path: Path, batch_id: str) -> tuple[list[tuple[str, str]], list[str]]:
    async with batch_app(ComputingRouter(), Storage(path), batch_idle_s=0.0) as app:
        batch = await ended(app, batch_id)
        assert batch["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        errors = await lines_in(app, batch["error_file_id"])
        files = (await fetch(app, "GET", "/v1/files")).json()["data"]
        assert len(files) == 3
        return (
            await texts_in(app, batch["output_file_id"]),
            [line["custom_id"] for line in errors],
        )


async def _crashed_first(path: Path, batch_id: str, storage: CrashingStorage) -> bool:
    """Waits until the storage crashes or the batch ends. Returns True if the storage crashed."""
    async with batch_app(ComputingRouter(), Storage(path), runs=False) as app:
        over = asyncio.create_task(ended(app, batch_id))
        crash = asyncio.create_task(storage.crashed.wait())
        await asyncio.wait({over, crash}, return_when=asyncio.FIRST_COMPLETED)
        for task in (over, crash):
            task.cancel()
        await asyncio.gather(over, crash, return_exceptions=True)
    return storage.crashed.is_set()


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_kill_between_any_two_transactions_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    monkeypatch.setattr(tables, "LEASE_S", 0)
    monkeypatch.setattr(tables, "SLICE_LINES", 2)
    monkeypatch.setattr(runner_module, "LOOK_EVERY_S", 0.001)
    path = tmp_path / "0"
    batch_id = await _begun(path, ComputingRouter())
    undisturbed = await _results(path, batch_id)
    assert len(undisturbed[0]) == 4
    num_crashes = 0
    for number in range(40):
        path = tmp_path / f"{number + 1}"
        assert await _begun(path, ComputingRouter()) == batch_id
        storage = CrashingStorage(path, number, is_done=is_done)
        async with batch_app(ComputingRouter(), storage, batch_idle_s=0.0):
            if not await _crashed_first(path, batch_id, storage):
                break
            num_crashes += 1
        assert await _results(path, batch_id) == undisturbed
    assert num_crashes >= 12


async def test_one_process_runs_the_batches_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = ComputingRouter(), ComputingRouter()
    async with batch_app(first, Storage(path)), batch_app(second, Storage(path)) as app:
        batch = await run(app, *LINES)
        assert batch["request_counts"]["completed"] == 7
        assert (len(first.requests), len(second.requests)) in ((7, 0), (0, 7))


async def test_a_gateway_that_stops_leaves_its_batches_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "store"
    router = FirstAnswers()
    async with batch_app(router, Storage(path)) as app:
        made = await create(app, await upload(app, file_of(*LINES)))
        await router.waiting.wait()
    assert router.live == 0
    async with batch_app(ComputingRouter(), Storage(path)) as app:
        batch = await ended(app, made["id"])
        assert batch["request_counts"] == {"total": 7, "completed": 7, "failed": 0}


def test_leases_are_for_one_owner_and_end() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript(tables.TABLES)
    assert tables.take_lease(connection, "a", 100)
    assert not tables.take_lease(connection, "b", 105)
    assert tables.take_lease(connection, "a", 105)
    assert not tables.take_lease(connection, "b", 110)
    assert tables.take_lease(connection, "b", 111)
    with pytest.raises(tables.LeaseLost):
        tables.check_lease(connection, "a")
    assert tables.take_lease(connection, "a", 50)  # the wall clock was set back
    tables.drop_lease(connection, "b")  # b does not own the lease
    tables.check_lease(connection, "a")
    connection.close()


def test_a_process_without_the_lease_keeps_no_result() -> None:
    connection = sqlite3.connect(":memory:")
    connection.executescript(tables.TABLES)
    tables.take_lease(connection, "a", 100)
    with pytest.raises(tables.LeaseLost):
        tables.keep_result(connection, "b", "batch_1", 1, b"{}", is_error=False)
    connection.close()
