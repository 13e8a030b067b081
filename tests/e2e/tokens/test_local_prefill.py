"""A decode worker that computes prompts itself, by direct messages without a router.

Whatever a request asks for, its tokens are those of a hand-over and those of the model alone.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine.config import RouterConfig, Speculate, WeightFormat, WorkerConfig
from engine.demand import DecodeCost
from engine.messages import (
    PROTOCOL_VERSION,
    Decode,
    FinishReason,
    FirstToken,
    GatewayId,
    Generate,
    Grammar,
    GrammarKind,
    Hello,
    LeaseRef,
    Limits,
    LoadReport,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Role,
    Sampling,
    SeqId,
    ToGateway,
    Tokens,
    ToWorker,
    Welcome,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.net.sessions import SessionClient
from engine.worker.costs import PrefillCost, WorkerCosts
from router.cluster.estimates import Estimates
from tests.kits.services.alone import answers_alone
from tests.kits.services.cluster import (
    DEADLINE_S,
    SECRET,
    Workers,
    ask,
    is_clean,
    prompts,
    request,
    router,
    take_turns,
    until,
    workers,
)

pytestmark = pytest.mark.torch

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-1")
PATIENT = RouterConfig(prefill_backlog_s=9.0)  # predictions are wrong here
CHUNK_TOKENS = 48
BLOCK_SIZE = 16  # tokens
NUM_TOKENS = 16
PROMPTS = prompts(8, vocab_size=4096, seed=21)
SAMPLINGS = [Sampling(temperature=0.8 if i % 2 else 0.0, seed=i) for i in range(len(PROMPTS))]
LONG_PROMPT = prompts(7, vocab_size=4096, seed=22, shortest=480, longest=480)[-1]


@dataclass(slots=True)
class Answer:
    """The results of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_steps: int = 0


class Link:
    """A gateway's session with one worker. Messages are kept in order of arrival."""

    def __init__(self, address: str) -> None:
        self._client = SessionClient(address, SECRET)
        self.inboxes: dict[SeqId, asyncio.Queue[ToGateway]] = defaultdict(asyncio.Queue)
        self.heard: list[ToGateway] = []  # of all sequences
        self.load: LoadReport | None = None  # the latest

    async def open(self) -> Welcome:
        await self._client.open()
        gateway_id = GatewayId(secrets.token_hex(4))
        await self._client.send(encode_frame([Hello(PROTOCOL_VERSION, gateway_id)]))
        (welcome,) = decode_to_gateway(await self._client.receive())
        assert isinstance(welcome, Welcome)
        self._reader = asyncio.create_task(self._read())
        return welcome

    async def close(self) -> None:
        self._reader.cancel()
        (result,) = await asyncio.gather(self._reader, return_exceptions=True)
        await self._client.close()
        if isinstance(result, Exception):
            raise result

    def tell(self, message: ToWorker) -> None:
        self._client.post(encode_frame([message]))

    async def hear(self, seq_id: SeqId, kind: type) -> ToGateway:
        """The next message of this kind about a sequence; others before it are passed over."""
        while not isinstance(message := await self.inboxes[seq_id].get(), kind):
            assert not hasattr(message, "reason"), message
        return message

    async def _read(self) -> None:
        while (frame := await self._client.receive()) is not None:
            for message in decode_to_gateway(frame):
                if isinstance(message, LoadReport):
                    self.load = message
                else:
                    self.heard.append(message)
                    self.inboxes[message.seq_id].put_nowait(message)


@dataclass(slots=True)
class Gateway:
    """Sends requests to one worker, or through both."""

    links: dict[WorkerId, Link]
    welcomes: dict[WorkerId, Welcome]
    num_asked: int = 0

    async def locally(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        num_tokens: int = NUM_TOKENS,
        num_top: int | None = None,
        prefix_of: WorkerId | None = None,
    ) -> Answer:
        """The decode worker's own answer; another worker may be asked for the prefix."""
        seq_id, limits = self._next(prompt, num_tokens)
        prefix = None if prefix_of is None else await self._offer(prefix_of, seq_id, prompt)
        link = self.links[DECODE]
        link.tell(Generate(seq_id, list(prompt), sampling, limits, prefix, num_top))
        started = await link.hear(seq_id, PrefillStarted)
        assert started.lease is None
        answer = Answer(num_cached_tokens=started.num_cached_tokens)
        if not await self._first(link, seq_id, answer):
            await self._rest(seq_id, answer)
        return answer

    async def handed_over(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        num_tokens: int = NUM_TOKENS,
        num_top: int | None = None,
    ) -> Answer:
        """The answer of both workers."""
        seq_id, limits = self._next(prompt, num_tokens)
        source, sink = self.links[PREFILL], self.links[DECODE]
        source.tell(Prefill(seq_id, list(prompt), sampling, limits, None, num_top))
        started = await source.hear(seq_id, PrefillStarted)
        sink.tell(Decode(seq_id, list(prompt), sampling, limits, started.lease))
        answer = Answer()
        assert not await self._first(source, seq_id, answer)
        sink.tell(FirstToken(seq_id, answer.token_ids[0]))
        await self._rest(seq_id, answer)
        return answer

    def _next(self, prompt: Sequence[int], num_tokens: int) -> tuple[SeqId, Limits]:
        self.num_asked += 1
        length = len(prompt)
        return SeqId(f"s{self.num_asked}"), Limits(length + num_tokens, prompt_len=length)

    async def _offer(self, worker: WorkerId, seq_id: SeqId, prompt: Sequence[int]) -> LeaseRef:
        self.links[worker].tell(OfferPrefix(seq_id, list(prompt)))
        offered = await self.links[worker].hear(seq_id, PrefixOffered)
        assert offered.lease is not None
        return offered.lease

    async def _first(self, link: Link, seq_id: SeqId, answer: Answer) -> FinishReason | None:
        done = await link.hear(seq_id, PrefillDone)
        answer.token_ids.append(done.token)
        answer.logprobs += [] if done.logprobs is None else [done.logprobs]
        answer.prompt_logprobs += done.prompt_logprobs
        return done.finish

    async def _rest(self, seq_id: SeqId, answer: Answer) -> None:
        finish = None
        while finish is None:
            tokens = await self.links[DECODE].hear(seq_id, Tokens)
            answer.token_ids += tokens.token_ids
            answer.logprobs += tokens.logprobs
            answer.num_steps += 1
            finish = tokens.finish


@asynccontextmanager
async def gateway(running: Workers) -> AsyncIterator[Gateway]:
    """Linked with both workers."""
    links = {worker_id: Link(ready.address) for worker_id, ready in running.ready.items()}
    async with asyncio.timeout(DEADLINE_S):
        welcomes = {worker_id: await link.open() for worker_id, link in links.items()}
        try:
            yield Gateway(links, welcomes)
        finally:
            for link in links.values():
                await link.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Workers]:
    config = WorkerConfig(
        kv_mib=64,
        chunk_tokens=CHUNK_TOKENS,
        weights=WeightFormat.FP32,
        speculate=Speculate.NGRAM,
    )
    with workers((Role.PREFILL, Role.DECODE), config=config, locally=True) as pair:
        yield pair
        asyncio.run(_conserved(pair))


async def _conserved(running: Workers) -> None:
    """Waits until both say that every block is free or cached."""
    async with gateway(running) as g:

        def balances(worker_id: WorkerId) -> bool:
            load = g.links[worker_id].load
            if not is_clean(load):
                return False
            return load.free_blocks + load.cached_blocks == g.welcomes[worker_id].num_blocks

        await until(lambda: all(map(balances, g.links)), lambda: f"{g.links[DECODE].load}", 10)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return answers_alone(PROMPTS, SAMPLINGS, num_tokens=NUM_TOKENS)


def test_prompts_computed_by_a_decode_worker_get_the_same_answers(running, alone):
    async def run() -> None:
        async with gateway(running) as g:
            says = {worker_id: w.generates for worker_id, w in g.welcomes.items()}
            assert says == {PREFILL: True, DECODE: True}
            pairs = list(zip(PROMPTS, SAMPLINGS, strict=True))
            # The hand-overs go the other way round, so that few blocks are cached by the others.
            found = await asyncio.gather(
                *(g.locally(*pair) for pair in pairs), *(g.handed_over(*p) for p in pairs[::-1])
            )
            token_ids = [answer.token_ids for answer in found]
            assert token_ids[: len(pairs)] == alone
            assert token_ids[len(pairs) :] == alone[::-1]

    asyncio.run(run())


def test_a_prefix_that_is_cached_or_pulled_changes_no_token(running):
    (long,) = answers_alone([LONG_PROMPT], SAMPLINGS[1:2], num_tokens=NUM_TOKENS)
    half, whole = 240, 480 - BLOCK_SIZE  # at least one token of the last block is computed

    async def run() -> None:
        async with gateway(running) as g:
            await g.handed_over(LONG_PROMPT[: half + 1], SAMPLINGS[0])
            cached = await g.locally(LONG_PROMPT, SAMPLINGS[1])
            assert (cached.num_cached_tokens, cached.token_ids) == (half, long)
            again = await g.locally(LONG_PROMPT, SAMPLINGS[1])
            assert (again.num_cached_tokens, again.token_ids) == (whole, long)

    asyncio.run(run())


def test_a_prefix_that_the_prefill_worker_holds_is_pulled_and_not_computed(running):
    prompt = [9, *LONG_PROMPT[1:]]
    (expected,) = answers_alone([prompt], SAMPLINGS[1:2], num_tokens=NUM_TOKENS)

    async def run() -> None:
        async with gateway(running) as g:
            seq_id, _ = g._next(prompt, 1)
            limits = Limits(len(prompt) + 1)
            g.links[PREFILL].tell(Prefill(seq_id, prompt, SAMPLINGS[0], limits))
            await g.links[PREFILL].hear(seq_id, PrefillDone)  # no worker decodes
            pulled = await g.locally(prompt, SAMPLINGS[1], prefix_of=PREFILL)
            assert pulled.num_cached_tokens == len(prompt) - BLOCK_SIZE
            assert pulled.token_ids == expected

    asyncio.run(run())


def test_short_prompts_go_to_the_decode_worker_while_prefill_is_busy(running, alone):
    """The router predicts from given costs, in C++ if that is built."""
    told = Estimates(WorkerCosts(PrefillCost(0.0, 1e-2), DecodeCost(5.0, 0.0, 0.0)))

    async def run() -> None:
        async with router(running, PATIENT, estimates=told, natively=True) as r:
            long = request("long", [7, *LONG_PROMPT[1:]], max_tokens=1, sampling=SAMPLINGS[0])
            short = request("short", PROMPTS[0], max_tokens=NUM_TOKENS, sampling=SAMPLINGS[0])
            workers = r.machine.view.workers.values()
            await until(lambda: not any(w.foreign.prompt_tokens for w in workers), "all are idle")
            first = asyncio.create_task(ask(r, long))
            await take_turns()
            quick = await ask(r, short)
            busy = await first
            assert busy.timeline.prefill_worker == PREFILL
            assert (quick.timeline.prefill_worker, quick.timeline.decode_worker) == (DECODE, DECODE)
            assert quick.token_ids == alone[0]

    asyncio.run(run())


def test_grammars_and_log_probabilities_equal_those_of_a_hand_over(running):
    grammar = Sampling(temperature=1.0, seed=4, grammar=Grammar(GrammarKind.REGEX, "[a-z]{3,9}"))
    scored = Sampling(temperature=0.7, seed=5, logprobs=2, repetition_penalty=1.3)

    async def run() -> None:
        async with gateway(running) as g:
            for sampling, num_top in ((grammar, None), (scored, 3)):
                local = await g.locally(PROMPTS[-1], sampling, num_top=num_top, num_tokens=3)
                other = await g.handed_over(PROMPTS[-1], sampling, num_top=num_top, num_tokens=3)
                assert (local.token_ids, local.logprobs) == (other.token_ids, other.logprobs)
                assert local.prompt_logprobs == other.prompt_logprobs
                num_scored = 0 if num_top is None else len(PROMPTS[-1]) - 1
                assert len(local.prompt_logprobs) == num_scored

    asyncio.run(run())


def test_a_running_stream_advances_in_every_step_beside_a_prompt(running):
    prompt = [11, *LONG_PROMPT[1:]]
    num_chunks = -(-len(prompt) // CHUNK_TOKENS)

    async def run() -> None:
        async with gateway(running) as g:
            stream = asyncio.create_task(g.handed_over(PROMPTS[0], SAMPLINGS[0], num_tokens=1500))
            link = g.links[DECODE]
            await until(lambda: Tokens in map(type, link.heard), "it decodes")
            await g.locally(prompt, SAMPLINGS[1], num_tokens=1)
            kinds = [(type(message), message.seq_id) for message in link.heard]
            begin, end = kinds.index((PrefillStarted, "s2")), kinds.index((PrefillDone, "s2"))
            # The last chunk's result comes after the stream's: decode rows go first.
            assert not stream.done(), "it ended too early to show anything"
            # Chunks are no longer than the pace of the stream allows.
            assert kinds[begin:end].count((Tokens, "s1")) >= num_chunks
            stream.cancel()  # the session ends, and the worker frees its blocks

    asyncio.run(run())
