"""A gateway in memory that places requests, cancels them and checks each token of the answer."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    LeaseRef,
    Limits,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Role,
    RoleChanged,
    Sampling,
    SeqId,
    SetRole,
    Tokens,
    ToWorker,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.worker.events import GatewayLost
from tests.kits.fakes.model import BLOCK_SIZE, LAYOUT, Answer, prompt_logprobs_of


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of an attempt. If both workers are equal, the sequence is decoded in place.

    A `holder` is first asked to offer the prompt's prefix.
    """

    prefill: WorkerId
    decode: WorkerId
    holder: WorkerId | None = None


@dataclass(slots=True)
class Ask:
    """One request, and the tokens that its client has so far."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    routes: Sequence[Route]  # one route per attempt, in order
    expected: Answer
    num_top: int | None = None  # top log-probabilities of the prompt, if requested
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None  # finished, cancelled or lost
    seq_id: SeqId | None = None
    num_attempts: int = 0
    # types of the messages received in the present attempt
    news: list[type] = field(default_factory=list)
    waits_for_offer: bool = False
    num_moves: int = 0
    moved: Route | None = None  # route of the present attempt, if it continues a moved answer
    # id after the move, while the worker has a hand-over order
    moves_as: SeqId | None = None
    moves_to: WorkerId | None = None

    @property
    def worker_id(self) -> WorkerId:
        """Returns the worker that decodes the request."""
        return self.route.decode

    @property
    def hands_over(self) -> bool:
        return self.route.prefill != self.route.decode

    @property
    def route(self) -> Route:
        if self.moved is not None:
            return self.moved
        return self.routes[self.num_attempts % len(self.routes)]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(slots=True)
class Link:
    """A gateway's session with one worker. Messages of one direction keep their order."""

    is_stuck: bool = False  # if true, no message is delivered for a while
    to_worker: deque[bytes | GatewayLost] = field(default_factory=deque)
    to_gateway: deque[bytes] = field(default_factory=deque)


class FakeGateway:
    """Follows requests across workers like the router, but without policies and timeouts."""

    def __init__(self, name: str, workers: Iterable[WorkerId]) -> None:
        self.gateway_id = GatewayId(name)
        self.links = {worker_id: Link() for worker_id in workers}
        self.asks: dict[SeqId, Ask] = {}  # requests by the id of their present attempt
        self._lease_sent: set[SeqId] = set()

    def submit(self, ask: Ask) -> None:
        """Starts a request, or its next attempt."""
        seq_id = SeqId(f"{ask.name}.{ask.num_attempts}")
        ask.seq_id, ask.news = seq_id, []
        self.asks[seq_id] = ask
        ask.waits_for_offer = ask.route.holder is not None
        if ask.route.holder is not None:
            self._send(ask.route.holder, OfferPrefix(seq_id, ask.token_ids))
        else:
            self._prefill(ask, None)

    def stop_waiting(self, ask: Ask) -> None:
        """Continues without the offered prefix, because the offer did not arrive in time."""
        if ask.waits_for_offer:
            assert ask.seq_id is not None
            assert ask.route.holder is not None
            self._send(ask.route.holder, Cancel(ask.seq_id))
            self._prefill(ask, None)

    def _prefill(self, ask: Ask, prefix: LeaseRef | None) -> None:
        assert ask.seq_id is not None
        ask.waits_for_offer = False
        kind = Generate if ask.route.prefill == ask.route.decode else Prefill
        num_top = None if ask.tokens else ask.num_top
        message = kind(ask.seq_id, ask.token_ids, ask.sampling, ask.limits, prefix, num_top)
        self._send(ask.route.prefill, message)

    def cancel(self, ask: Ask) -> None:
        """Cancels a request because its client has disconnected."""
        ask.outcome = "cancelled"
        self._end_attempt(ask)

    def set_role(self, worker_id: WorkerId, role: Role) -> None:
        """Sets a worker's role, as the controller does."""
        self._send(worker_id, SetRole(role))

    def hand_over(self, ask: Ask, target: WorkerId) -> None:
        """Moves a running answer to another worker, unless a move of this answer has already
        begun."""
        has_begun = PrefillDone in ask.news and (KvReady in ask.news or not ask.hands_over)
        if has_begun and ask.moves_as is None and ask.worker_id != target:
            assert ask.seq_id is not None
            ask.num_moves += 1
            ask.moves_as = SeqId(f"{ask.name}.{ask.num_attempts}.{ask.num_moves}")
            ask.moves_to = target
            self._send(ask.worker_id, HandOver(ask.seq_id, ask.moves_as))

    def _move(self, ask: Ask, message: HandedOver) -> None:
        """Continues a stopped answer as a new sequence whose prompt KV is already computed."""
        assert ask.seq_id is not None
        assert ask.moves_as is not None
        assert ask.moves_to is not None
        if message.lease is None:
            self.retry(ask)
            return
        del self.asks[ask.seq_id]
        ask.moved = Route(ask.worker_id, ask.moves_to)
        ask.seq_id, ask.moves_as = ask.moves_as, None
        ask.news = [PrefillStarted, PrefillDone]
        self.asks[ask.seq_id] = ask
        *token_ids, last = ask.token_ids
        fields = (ask.seq_id, token_ids, ask.sampling, ask.limits, message.lease)
        self._send(ask.moves_to, Decode(*fields, message.num_draft_tokens, is_moved=True))
        self._send(ask.moves_to, FirstToken(ask.seq_id, last))

    def retry(self, ask: Ask) -> None:
        """Starts the next attempt, after the worker rejected the last one or was silent too
        long."""
        self._end_attempt(ask)
        ask.num_attempts += 1
        ask.moved = None
        self.submit(ask)

    def give_up(self) -> None:
        """Marks all requests as lost, because the gateway has died."""
        for ask in self.asks.values():
            ask.outcome = "lost"
        self.asks.clear()

    def take(self, worker_id: WorkerId) -> None:
        """Handles a worker's next message."""
        (message,) = decode_to_gateway(self.links[worker_id].to_gateway.popleft())
        if isinstance(message, RoleChanged):
            return
        ask = self.asks.get(message.seq_id)  # type: ignore[union-attr]
        if ask is None:
            return  # the attempt is already over
        self._check_order(ask, message)
        match message:
            case PrefixOffered(_, lease):
                if ask.waits_for_offer:
                    self._prefill(ask, lease)
            case PrefillStarted(seq_id, num_cached_tokens, lease):
                assert not ask.waits_for_offer
                assert num_cached_tokens < len(ask.token_ids)
                if lease is not None:
                    assert ask.route.prefill != ask.route.decode
                    self._lease_sent.add(seq_id)
                    decode = Decode(seq_id, ask.token_ids, ask.sampling, ask.limits, lease)
                    self._send(ask.route.decode, decode)
            case PrefillDone(seq_id, token, finish, logprobs, prompt_logprobs):
                asked = ask.num_top if not ask.tokens else None
                wanted = [] if asked is None else prompt_logprobs_of(ask.prompt, asked)
                assert prompt_logprobs == wanted, f"the prompt of {ask.name} was scored wrongly"
                self._deliver(ask, [token], finish, [] if logprobs is None else [logprobs])
                if finish is None and seq_id in self._lease_sent:
                    self._send(ask.route.decode, FirstToken(seq_id, token))
            case KvReady(_, num_pulled_blocks, num_cached_blocks):
                num_prefilled = len(ask.token_ids) - (PrefillDone in ask.news)
                expected_blocks = LAYOUT.num_blocks_for(num_prefilled)
                assert num_pulled_blocks + num_cached_blocks == expected_blocks
            case DecodeStarted():
                pass
            case Tokens(_, token_ids, finish, logprobs, num_drafted, num_accepted):
                assert 0 <= len(token_ids) - 1 <= num_accepted <= num_drafted
                self._deliver(ask, token_ids, finish, logprobs)
            case HandedOver():
                self._move(ask, message)
            case GivenBack(num_kept_tokens=num_kept_tokens):
                assert num_kept_tokens <= len(ask.token_ids)
                assert num_kept_tokens % BLOCK_SIZE == 0
                self.retry(ask)
            case other:
                raise AssertionError(f"unexpected message: {other}")

    def _deliver(
        self, ask: Ask, token_ids: list[int], finish: FinishReason | None, logprobs: list[Logprobs]
    ) -> None:
        num_before = len(ask.tokens)
        ask.tokens += token_ids
        expected_logprobs = ask.expected.logprobs[num_before : len(ask.tokens)]
        assert tuple(logprobs) == expected_logprobs, f"{ask.name} was scored wrongly"
        expected = ask.expected.token_ids[: len(ask.tokens)]
        assert tuple(ask.tokens) == expected, f"{ask.name} was answered wrongly"
        complete = len(ask.tokens) == len(ask.expected.token_ids)
        assert finish == (ask.expected.finish if complete else None)
        if finish is not None:
            ask.outcome = "finished"
            self._end_attempt(ask)

    def _check_order(self, ask: Ask, message: object) -> None:
        """Asserts the order of an attempt's messages. Only token messages may repeat."""
        kind = type(message)
        needed: dict[type, set[type]] = {
            PrefillDone: {PrefillStarted},
            KvReady: {PrefillStarted},
            DecodeStarted: {PrefillDone},
            Tokens: {PrefillDone, DecodeStarted},
        }
        assert needed.get(kind, set()) <= set(ask.news), f"{kind.__name__} came too early"
        assert kind is Tokens or kind not in ask.news, f"{kind.__name__} came twice"
        ask.news.append(kind)

    def _end_attempt(self, ask: Ask) -> None:
        assert ask.seq_id is not None
        del self.asks[ask.seq_id]
        route = ask.route
        may_be_offered = route.holder is not None and PrefillStarted not in ask.news
        concerned = [route.prefill, route.decode, *([route.holder] if may_be_offered else [])]
        for worker_id in dict.fromkeys(w for w in concerned if w is not None):
            self._send(worker_id, Cancel(ask.seq_id))
        if ask.moves_as is not None:
            self._send(ask.worker_id, Cancel(ask.moves_as))
            ask.moves_as = None

    def _send(self, worker_id: WorkerId, message: ToWorker) -> None:
        self.links[worker_id].to_worker.append(encode_frame([message]))
