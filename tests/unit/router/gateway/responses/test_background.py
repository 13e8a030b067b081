"""Background responses: started, followed, cancelled, lost and ended, with two processes."""

import asyncio

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError

from router.gateway.background import BackgroundWork
from router.gateway.responses import runs, table
from router.gateway.storage import Storage
from router.machine.requests import Failed, Update
from tests.kits.router.gateway import (
    FakeRouter,
    Never,
    answer,
    fetch,
    get,
    make_app,
    samples,
    tokens,
)
from tests.kits.router.responses import CONTEXT_LEN, app_on, client_of, until, with_client
from tests.kits.tree.compat import like

STATEFUL = "entrypoints/openai/responses/test_stateful.py"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Writes events at once instead of every tenth of a second."""
    monkeypatch.setattr(runs, "FLUSH_S", 0.001)
    monkeypatch.setattr(runs, "RENEW_S", 0.002)
    monkeypatch.setattr(runs, "POLL_S", 0.005)


def app_of(router, **settings):
    return make_app(router, context_len=CONTEXT_LEN, **settings)


async def ended(client, id):
    """Waits until the response has ended, and returns it."""
    found = None

    async def has_ended():
        nonlocal found
        found = await client.responses.retrieve(id)
        return found.status not in ("queued", "in_progress")

    await until(has_ended)
    return found


@like("vllm", STATEFUL, "test_background")
def test_a_background_response_is_fetched_when_it_is_ready():
    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        assert (made.status, made.output, made.background) == ("queued", [], True)
        found = await ended(client, made.id)
        assert (found.status, found.output_text) == ("completed", "hi")
        more = await client.responses.create(input="more", previous_response_id=made.id)
        assert more.status == "completed"

    app = app_of(FakeRouter())
    with_client(app, use)
    counts = samples(app)["baton_requests_total"]
    assert counts[(("outcome", "finished"),)] == 2
    assert samples(app)["baton_requests_in_flight"][()] == 0


def test_a_wrong_one_is_refused_at_once():
    async def use(client):
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(input="x" * 9000, background=True)
        assert caught.value.param == "input"

    app = app_of(FakeRouter())
    with_client(app, use)
    assert samples(app)["baton_requests_total"][(("outcome", "invalid"),)] == 1


def test_one_that_fails_says_why():
    router = FakeRouter([tokens("a"), Update(outcome=Failed("a worker died"))])

    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        found = await ended(client, made.id)
        assert (found.status, found.error.message) == ("failed", "a worker died")
        assert found.output_text == "a"

    with_client(app_of(router), use)


def test_a_bug_is_a_failure_too():
    router = FakeRouter([tokens("a"), RuntimeError("a bug")])

    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        found = await ended(client, made.id)
        assert (found.status, found.error.message) == ("failed", "internal error")

    with_client(app_of(router), use)


def test_one_that_runs_cannot_be_continued():
    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(input="more", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"
        await client.responses.cancel(made.id)

    with_client(app_of(FakeRouter([tokens("a"), Never()])), use)


@like("vllm", STATEFUL, "test_background_cancel")
def test_cancelling_ends_the_request():
    router = FakeRouter([tokens("a"), Never()])

    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        await router.waiting.wait()
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        await until(is_idle)
        assert (await client.responses.retrieve(made.id)).status == "cancelled"

    async def is_idle():
        return router.live == 0

    app = app_of(router)
    with_client(app, use)
    assert samples(app)["baton_requests_total"][(("outcome", "cancelled"),)] == 1


def test_deleting_ends_the_request():
    router = FakeRouter([tokens("a"), Never()])

    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        await router.waiting.wait()
        await client.responses.delete(made.id)
        await until(is_idle)
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(made.id)

    async def is_idle():
        return router.live == 0

    with_client(app_of(router), use)


def test_events_can_be_followed_again_from_any_number():
    async def use(client):
        stream = await client.responses.create(input="yo", background=True, stream=True)
        events = [event async for event in stream]
        id = events[0].response.id
        names = [event.type.removeprefix("response.") for event in events]
        assert names[:3] == ["created", "queued", "in_progress"]
        assert names[-1] == "completed"
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(len(events)))
        for last in (0, 4, numbers[-2], numbers[-1]):
            again = await client.responses.retrieve(id, stream=True, starting_after=last)
            assert [e.sequence_number async for e in again] == numbers[last + 1 :]
        async with client.responses.stream(response_id=id) as whole:
            assert (await whole.get_final_response()).output_text == "hi"

    with_client(app_of(FakeRouter()), use)


def test_a_follower_of_a_cancelled_response_is_reported():
    router = FakeRouter([tokens("a"), Never()])

    async def use(client):
        stream = await client.responses.create(input="yo", background=True, stream=True)
        names = []
        async for event in stream:
            names.append(event.type)
        return names

    async def run():
        app = app_of(router)
        async with client_of(app) as client:
            following = asyncio.create_task(use(client))
            await router.waiting.wait()
            id = router.requests[0].request_id

            async def is_there():
                return (await fetch(app, "GET", f"/v1/responses/{id}")).status == 200

            await until(is_there)
            await client.responses.cancel(id)
            return await following

    names = asyncio.run(run())
    assert names[0] == "response.created"
    assert names[-1] == "response.cancelled"


def test_a_client_that_leaves_does_not_end_a_background_response():
    router = FakeRouter([tokens("a"), Never()])

    async def run():
        app = app_of(router)
        body = b'{"input": "yo", "background": true, "stream": true}'
        following = asyncio.create_task(fetch(app, "POST", "/v1/responses", body))
        await router.waiting.wait()
        id = router.requests[0].request_id
        async with client_of(app) as client:

            async def is_running():
                status = (await fetch(app, "GET", f"/v1/responses/{id}")).json().get("status")
                return status == "in_progress"

            await until(is_running)
            following.cancel()
            await asyncio.wait([following])
            assert (await client.responses.retrieve(id)).status == "in_progress"
            assert router.live == 1
            await client.responses.cancel(id)

    asyncio.run(run())


def test_only_so_many_run_at_once():
    router = FakeRouter([Never()])

    async def use(client):
        made = await client.responses.create(input="yo", background=True)
        with pytest.raises(APIStatusError) as caught:
            await client.responses.create(input="yo", background=True)
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        await client.responses.cancel(made.id)

    with_client(app_of(router, max_background_responses=1), use)


def test_a_timeout_ends_it():
    router = FakeRouter([Never()])

    async def use(client):
        made = await client.responses.create(
            input="yo", background=True, extra_headers={"x-request-timeout": "0.01"}
        )
        found = await ended(client, made.id)
        assert (found.status, found.error.code) == ("failed", "request_timeout")

    router.clock = StillClock()
    with_client(app_of(router), use)


class StillClock:
    def now_s(self):
        return 0.0


def test_another_process_reads_and_cancels(tmp_path):
    router = FakeRouter([tokens("a"), Never()], answer("so"), answer("ok"))

    async def run():
        stores = [Storage(tmp_path / "store") for _ in range(2)]
        one, two = (app_on(router, store, seed) for seed, store in enumerate(stores))
        async with client_of(one) as here, client_of(two) as there:
            body = b'{"input": "yo", "background": true, "stream": true}'
            making = asyncio.create_task(fetch(one, "POST", "/v1/responses", body))
            await router.waiting.wait()
            id = router.requests[0].request_id

            async def has_text():
                status = (await fetch(two, "GET", f"/v1/responses/{id}")).json().get("status")
                return status == "in_progress"

            await until(has_text)
            following = asyncio.create_task(names_of(there, id))
            assert (await there.responses.cancel(id)).status == "cancelled"

            async def is_idle():
                return router.live == 0

            await until(is_idle)
            names = await following
            assert names[:2] == ["response.created", "response.queued"]
            assert names[-1] == "response.cancelled"
            assert (await making).body.decode().count("event: ") == len(names)
            first = await here.responses.create(input="a")
            second = await there.responses.create(input="b", previous_response_id=first.id)
            assert second.output_text == "ok"
        for store in stores:
            await store.close()

    asyncio.run(run())


async def names_of(client, id):
    stream = await client.responses.retrieve(id, stream=True)
    return [event.type async for event in stream]


def test_a_response_of_a_dead_process_has_failed(tmp_path, monkeypatch):
    router = FakeRouter([tokens("a"), Never()])
    monkeypatch.setattr(runs, "RENEW_S", 1000.0)

    async def run():
        stores = [Storage(tmp_path / "store") for _ in range(2)]
        one, two = (app_on(router, store, seed) for seed, store in enumerate(stores))
        async with client_of(one) as here, client_of(two) as there:
            made = await here.responses.create(input="yo", background=True)
            await router.waiting.wait()
            await stores[0].run(lambda db: db.execute("UPDATE responses SET lease_end_s = 1"))
            found = await there.responses.retrieve(made.id)
            assert found.status == "failed"
            assert "process" in found.error.message
            await there.responses.delete(made.id)
            monkeypatch.setattr(runs, "RENEW_S", 0.0)

            async def is_idle():
                return router.live == 0

            await until(is_idle)
        for store in stores:
            await store.close()

    asyncio.run(run())


def test_events_that_are_gone_are_not_made_up(monkeypatch):
    monkeypatch.setattr(table, "MAX_EVENTS_BYTES", 3000)
    router = FakeRouter(answer("h" * 500))

    async def use(client):
        await client.responses.create(input="yo", background=True, stream=True)
        id = router.requests[0].request_id
        await ended(client, id)
        again = [event async for event in await client.responses.retrieve(id, stream=True)]
        assert [event.type for event in again] == ["error"]
        assert "are gone" in again[0].message

    with_client(app_of(router), use)


def test_unknown_paths_and_methods_stay_unknown():
    app = app_of(FakeRouter())
    assert get(app, "/v1/responses/resp_1").json()["error"]["code"] == "not_found"
    assert get(app, "/v1/responses/resp_1/else").status == 404
    assert get(app, "/v1/responses").status == 405


@pytest.mark.parametrize("hurries", [False, True])
def test_a_drain_ends_what_runs(hurries):
    router = FakeRouter([tokens("a"), Never()])
    background = BackgroundWork()

    async def run():
        app = app_on(router, Storage(None), background=background)
        async with client_of(app) as client:
            made = await client.responses.create(input="yo", background=True)
            await router.waiting.wait()
            if hurries:
                closing = asyncio.create_task(background.close(1000.0))
                await asyncio.sleep(0)
                background.stop_draining()
                await closing
            else:
                await background.close(0.01)
            found = await client.responses.retrieve(made.id)
            assert (found.status, found.output_text) == ("failed", "a")
            assert "stopped" in found.error.message
            with pytest.raises(APIStatusError) as caught:
                await client.responses.create(input="yo", background=True)
            assert (caught.value.status_code, caught.value.code) == (503, "server_shutdown")

    asyncio.run(run())
    assert router.live == 0
    assert len(router.cancelled) == 1


def test_a_drain_waits_for_what_ends_in_time():
    router = FakeRouter()
    background = BackgroundWork()

    async def run():
        app = app_on(router, Storage(None), background=background)
        async with client_of(app) as client:
            made = await client.responses.create(input="yo", background=True)
            await background.close(30.0)
            assert (await client.responses.retrieve(made.id)).status == "completed"

    asyncio.run(run())
