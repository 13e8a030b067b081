"""What sinks get of a turn: the tokens of each step apart, the last ones with the end."""

from types import SimpleNamespace

from engine.messages import FinishReason
from router.clients import RouterClients
from router.machine.events import Deliver, End
from router.machine.requests import Finished, Timeline, Update

TIMELINE = Timeline(0.0, 0.0, 0.0, 0.0)
DONE = Finished(FinishReason.LENGTH)


class Noting:
    """A sink that keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def tokens(self, token_ids, now_s) -> None:
        self.calls.append(token_ids)

    def update(self, update: Update) -> None:
        self.calls.append(update)


async def test_each_steps_tokens_come_apart_and_the_last_ones_with_the_end():
    clients = RouterClients(SimpleNamespace(flights={}), lambda *_: None)
    sink = Noting()
    clients.submit(SimpleNamespace(request_id="r"), sink)
    first = Deliver("r", (1,), TIMELINE)
    clients.deliver({"r": [first, Deliver("r", (2,))]}, 0.0)
    steps = [Deliver("r", (token,)) for token in (3, 4, 5)]
    clients.deliver({"r": [*steps, End("r", DONE, TIMELINE)]}, 0.0)
    last = Update((5,), DONE, TIMELINE)
    assert sink.calls == [Update((1, 2), timeline=TIMELINE), (3,), (4,), last]
    clients.deliver({"r": steps}, 0.0)
    assert len(sink.calls) == 4
