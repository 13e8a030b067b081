"""Subscribers of the dashboard's feed: bounded in number, and disconnected if they do not read."""

import asyncio

import pytest

from router.gateway.dashboard.service import MAX_SUBSCRIBERS, MAX_UNREAD, Feed
from router.inbox.api_errors import ApiError


async def _take(frames, number):
    return [await anext(frames) for _ in range(number)]


def test_all_subscribers_get_the_same_frames():
    async def check():
        feed = Feed()
        first, second = feed.follow(lambda: b"a"), feed.follow(lambda: b"b")
        assert [await anext(first), await anext(second)] == [b"a", b"b"]
        feed.publish(b"1")
        assert await _take(first, 1) == await _take(second, 1) == [b"1"]
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(first)
        await second.aclose()
        assert feed.num_subscribers == 0

    asyncio.run(check())


def test_a_subscriber_that_does_not_read_is_cut_off():
    async def check():
        feed = Feed()
        frames = feed.follow(lambda: b"state")
        await anext(frames)
        for _ in range(MAX_UNREAD + 1):
            feed.publish(b"tick")
        assert feed.num_subscribers == 0
        assert feed.counters["cut off"] == 1
        assert await _take(frames, MAX_UNREAD - 1) == [b"tick"] * (MAX_UNREAD - 1)
        with pytest.raises(StopAsyncIteration):
            await anext(frames)

    asyncio.run(check())


def test_subscribers_are_bounded():
    async def check():
        feed = Feed()
        streams = [feed.follow(bytes) for _ in range(MAX_SUBSCRIBERS)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError, match="too many"):
            feed.check()
        await streams[0].aclose()
        feed.check()
        feed.close()
        with pytest.raises(ApiError, match="stopping"):
            feed.check()

    asyncio.run(check())
