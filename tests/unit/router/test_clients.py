"""What a sink receives: token lists, or updates if there is more to report."""

from types import SimpleNamespace

from engine.messages import FinishReason
from router.clients import RouterClients
from router.machine.requests import Finished, Timeline, Update

TIMELINE = Timeline(0.0, 0.0, 0.0, 0.0)
DONE = Finished(FinishReason.LENGTH)


class Noting:
    """A sink that records its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def tokens(self, token_ids, now_s) -> None:
        self.calls.append(token_ids)

    def update(self, update: Update) -> None:
        self.calls.append(update)


async def test_plain_tokens_come_bare_and_all_else_as_updates():
    clients = RouterClients(SimpleNamespace(flights={}), lambda *_: None)
    sink = Noting()
    clients.submit(SimpleNamespace(request_id="r"), sink)
    first = Update((1,), timeline=TIMELINE, request_id="r")
    clients.deliver([first, Update((2,), request_id="r")], 0.0)
    steps = [Update((token,), request_id="r") for token in (3, 4)]
    last = Update((5,), DONE, TIMELINE, request_id="r")
    clients.deliver([*steps, last], 0.0)
    assert sink.calls == [first, (2,), (3,), (4,), last]
    clients.deliver(steps, 0.0)
    assert len(sink.calls) == 5
