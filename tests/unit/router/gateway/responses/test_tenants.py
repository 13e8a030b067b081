"""A response is visible only to the API key that created it."""

import asyncio

import pytest
from openai import BadRequestError, NotFoundError, RateLimitError

from router.gateway.storage import Storage
from tests.kits.router.access import key_file
from tests.kits.router.gateway import FakeRouter, Never, tokens
from tests.kits.router.responses import app_on, client_of


@pytest.fixture
def keys(tmp_path):
    return key_file(tmp_path / "keys.json", "k1", "k2", group="team")


def test_no_key_sees_anothers_even_of_its_group(keys):
    async def run():
        app = app_on(FakeRouter(), Storage(None), keys=keys)
        async with client_of(app, "k1") as one, client_of(app, "k2") as two:
            made = await one.responses.create(input="yo")
            responses = two.responses
            for call in (responses.retrieve, responses.delete, responses.cancel):
                with pytest.raises(NotFoundError):
                    await call(made.id)
            with pytest.raises(NotFoundError):
                await responses.input_items.list(made.id)
            with pytest.raises(BadRequestError) as caught:
                await responses.create(input="more", previous_response_id=made.id)
            assert caught.value.param == "previous_response_id"
            with pytest.raises(BadRequestError) as caught:
                await responses.create(input=[{"type": "item_reference", "id": made.output[0].id}])
            assert caught.value.param == "input[0].id"
            assert (await one.responses.retrieve(made.id)).id == made.id

    asyncio.run(run())


def test_limits_of_a_key_hold_in_the_background(keys):
    router = FakeRouter([tokens("a"), Never()])

    async def run():
        app = app_on(router, Storage(None), keys=keys, max_streams=1)
        async with client_of(app, "k1") as one, client_of(app, "k2") as two:
            made = await one.responses.create(input="yo", background=True)
            await router.waiting.wait()
            for background in (False, True):
                with pytest.raises(RateLimitError):
                    await one.responses.create(input="yo", background=background)
            await one.responses.cancel(made.id)
            other = await two.responses.create(input="yo", background=True)
            await two.responses.cancel(other.id)

    asyncio.run(run())
