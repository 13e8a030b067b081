"""An outbox sends frames in order, at once if nothing waits, and nothing after a failed frame."""

import asyncio

import pytest

from engine.net.rpc import Outbox


class Stream:
    """Takes a frame at a time; `paused` ones are taken when `release` says so."""

    def __init__(self, *, paused=False):
        self.sent = []
        self.num_begun = 0
        self.error = None
        self._paused = paused
        self._waiters = []

    async def send(self, frame):
        self.num_begun += 1
        if self._paused:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.error is not None:
            raise self.error
        self.sent.append(frame)

    async def release(self):
        self._waiters.pop(0).set_result(None)
        await asyncio.sleep(0)


async def test_post_sends_at_once_if_nothing_waits():
    stream = Stream()
    outbox = Outbox(stream.send)
    outbox.post(b"1")
    outbox.post(b"2")
    assert stream.sent == [b"1", b"2"]


async def test_frames_keep_their_order():
    stream = Stream(paused=True)
    outbox = Outbox(stream.send)
    for frame in (b"1", b"2", b"3"):
        outbox.post(frame)
    for num_sent in range(3):
        assert (len(stream.sent), stream.num_begun) == (num_sent, num_sent + 1)
        await stream.release()
    assert stream.sent == [b"1", b"2", b"3"]


@pytest.mark.parametrize("paused", [False, True])
async def test_nothing_is_sent_after_a_failed_frame(paused):
    stream = Stream(paused=paused)
    stream.error = ConnectionError("gone")
    outbox = Outbox(stream.send)
    outbox.post(b"1")
    if paused:
        outbox.post(b"2")
        await stream.release()
    assert outbox.broken == "gone"
    with pytest.raises(ConnectionError, match="gone"):
        outbox.post(b"3")
    assert stream.num_begun == 1


async def test_closed_outbox_cancels_a_frame_in_flight():
    stream = Stream(paused=True)
    outbox = Outbox(stream.send)
    outbox.post(b"1")
    outbox.post(b"2")
    outbox.close()
    await stream.release()
    assert (stream.sent, stream.num_begun) == ([], 1)
    with pytest.raises(ConnectionError, match="closed"):
        outbox.post(b"3")
