"""The runner's tokens equal the tokens of transformers, for any chunks, blocks and batch."""

import random
from functools import cache, partial

import pytest

from engine.config import WeightFormat
from engine.errors import CheckpointError, ConfigError
from engine.layout import KVFormat
from engine.messages import Sampling
from engine.model.runner import TorchRunner, TorchStep
from engine.worker.batch import BatchPlan, Row, RowResult, StepTimes
from tests.kits.checkpoints import KINDS, tiny_checkpoint
from tests.kits.models.sequences import SharedBuffer, scattered
from tests.kits.models.served import generate

pytestmark = pytest.mark.torch

NUM_BLOCKS = 400
BLOCK_SIZE = 4
NUM_NEW_TOKENS = 20
GREEDY = Sampling(temperature=0.0)


class FakeClock:
    def __init__(self):
        self.time_s = 10.0

    def now_s(self):
        return self.time_s


def test_a_step_has_a_result_once_the_device_has_passed_its_fence():
    clock, passed = FakeClock(), []

    class SlowDevice:
        def synchronize(self):
            clock.time_s += 3.0
            passed.append("fence")

    times = StepTimes(prepare_s=0.5, forward_s=1.0, sample_s=0.0)
    step = TorchStep([RowResult()], times, 10.0, clock, SlowDevice())
    clock.time_s += 2.0
    assert not passed
    result = step.result()
    assert passed == ["fence"]
    assert result.times == StepTimes(prepare_s=0.5, forward_s=1.0, sample_s=3.5)


class Client:
    """A sequence that is computed in chunks and then token by token, in the way of schedulers."""

    def __init__(self, name, prompt, chunks, sampling, blocks):
        self.name = name
        self.token_ids = list(prompt)
        self.prompt_len = len(prompt)
        self.chunks = list(chunks)
        self.sampling = sampling
        self.blocks = blocks
        self.num_computed = 0

    @property
    def answer(self):
        return self.token_ids[self.prompt_len :]

    def next_row(self):
        wanted = len(self.token_ids) - self.num_computed
        chunk = min(wanted, self.chunks.pop(0) if self.chunks else wanted)
        start, self.num_computed = self.num_computed, self.num_computed + chunk
        last = self.num_computed == len(self.token_ids)
        return Row(
            self.name,
            self.token_ids[start : self.num_computed],
            start,
            self.blocks,
            self.sampling if last else None,
        )

    def take(self, token):
        if token is not None:
            self.token_ids.append(token)


def serve(runner, clients):
    """Runs all clients in common batches until each client has its new tokens."""
    while running := [c for c in clients if len(c.answer) < NUM_NEW_TOKENS]:
        result = runner.run(BatchPlan([c.next_row() for c in running]))
        for client, token in zip(running, result.tokens, strict=True):
            client.take(token)
    return [client.answer for client in clients]


scattered = partial(scattered, num_blocks=NUM_BLOCKS)


def prompts(count):
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.choice((3, 13, 24, 31)))] for _ in range(count)]


@cache
def opened(path, **options):
    # transformers computes its answers in fp32.
    options.setdefault("weights", WeightFormat.FP32)
    runner = TorchRunner(path, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **options)
    runner.open()
    return runner


@pytest.fixture
def llama(tmp_path_factory):
    return opened(tiny_checkpoint(tmp_path_factory, "llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_equal_transformers(kind, tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, kind)
    runner = opened(path)
    texts = prompts(3)
    expected = [generate(path, text, NUM_NEW_TOKENS) for text in texts]
    chunks = ((7, 1, 5), (1, 2, 3, 11), ())

    alone = [
        serve(runner, [Client("alone", text, chunk, GREEDY, blocks)])[0]
        for text, chunk, blocks in zip(texts, chunks, scattered(3), strict=True)
    ]
    assert alone == expected

    company = [
        Client(f"other {i}", text, (i % 5 + 1,) * (i % 3), Sampling(seed=i), blocks)
        for i, (text, blocks) in enumerate(zip(prompts(13), scattered(16)[3:], strict=True))
    ]
    watched = [
        Client(f"watched {i}", text, chunk, GREEDY, blocks)
        for i, (text, chunk, blocks) in enumerate(
            zip(texts, reversed(chunks), scattered(16)[:3], strict=True)
        )
    ]
    clients = company + watched
    random.Random(2).shuffle(clients)
    serve(runner, clients)
    assert [client.answer for client in watched] == expected


def test_sampled_answers_do_not_depend_on_chunks_blocks_or_batch(llama):
    texts = prompts(6)
    samplings = [
        Sampling(temperature=0.8, seed=i, top_k=30 * (i % 2), top_p=0.95 if i > 3 else 1.0)
        for i in range(6)
    ]
    alone = [
        serve(llama, [Client("alone", text, (), sampling, scattered(1)[0])])[0]
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    together = serve(
        llama,
        [
            Client(f"s{i}", text, (i + 1, 3), sampling, blocks)
            for i, (text, sampling, blocks) in enumerate(
                zip(texts, samplings, scattered(6, seed=5), strict=True)
            )
        ],
    )
    assert together == alone


def test_recomputing_its_tokens_does_not_change_an_answer(llama):
    """After a failover, prompt and answer so far are prefilled again. The next token stays the
    same.
    """
    (text,) = prompts(1)
    sampling = Sampling(temperature=1.0, seed=11)
    (answer,) = serve(llama, [Client("a", text, (), sampling, scattered(1)[0])])
    for cut in (1, 7, NUM_NEW_TOKENS - 1):
        row = Row("b", text + answer[:cut], 0, scattered(2)[1], sampling)
        assert llama.run(BatchPlan([row])).tokens == [answer[cut]]


def test_a_prefix_computed_for_one_sequence_serves_another(llama):
    (text,) = prompts(1)
    text = (text * 4)[: 3 * BLOCK_SIZE + 2]
    first, second = scattered(2)
    (expected,) = llama.run(BatchPlan([Row("a", text, 0, first, GREEDY)])).tokens
    start = 3 * BLOCK_SIZE
    shared = first[:3] + second
    (found,) = llama.run(BatchPlan([Row("b", text[start:], start, shared, GREEDY)])).tokens
    assert found == expected


def test_a_row_without_sampling_gives_no_token(llama):
    a, b, c = scattered(3)
    assert llama.run(BatchPlan([Row("a", [1, 2], 0, a, None)])).tokens == [None]
    rows = [Row("a", [3], 2, a, None), Row("b", [1], 0, b, GREEDY), Row("c", [1], 0, c, None)]
    first, second, third = llama.run(BatchPlan(rows)).tokens
    assert (first, third) == (None, None)
    assert second is not None
    assert not llama.run(BatchPlan([])).tokens


def test_banned_ids_are_not_chosen(llama):
    blocks = scattered(1)[0]
    banned = ()
    for _ in range(5):
        row = Row("a", [5, 6, 7], 0, blocks, GREEDY, banned)
        banned = (*banned, *llama.run(BatchPlan([row])).tokens)
    assert len(set(banned)) == 5


def test_a_bf16_cache_gives_answers_that_do_not_depend_on_chunks(tmp_path_factory):
    """K and V are read only from the record, so those of the present chunk are rounded too."""
    runner = opened(tiny_checkpoint(tmp_path_factory, "qwen3"), kv_format=KVFormat.BF16)
    text = prompts(4)[3]
    whole, chunked = (
        serve(runner, [Client("a", text, chunks, GREEDY, scattered(1)[0])])
        for chunks in ((), (1,) * 30)
    )
    assert whole == chunked


def test_blocks_copied_as_bytes_work_in_another_pool(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "mistral")
    source, sink = (
        opened(path),
        TorchRunner(path, block_size=BLOCK_SIZE, num_blocks=40, weights=WeightFormat.FP32),
    )
    sink.open()
    assert (source.layout, source.fingerprint) == (sink.layout, sink.fingerprint)
    text = prompts(4)[3]
    blocks = scattered(1)[0]
    (expected,) = serve(source, [Client("a", text, (), GREEDY, blocks)])
    client = Client("a", text, (), GREEDY, random.Random(3).sample(range(40), 20))
    size = source.layout.block_bytes
    for ours, theirs in zip(blocks, client.blocks[: -(-len(text) // BLOCK_SIZE)], strict=False):
        sink.buffer[theirs * size : (theirs + 1) * size] = source.buffer[
            ours * size : (ours + 1) * size
        ]
    client.take(expected[0])
    client.num_computed = len(text)
    assert serve(sink, [client]) == [expected]


def test_kv_can_live_in_shared_memory_and_be_released(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    buffer = SharedBuffer()
    runner = TorchRunner(path, block_size=BLOCK_SIZE, kv_bytes=100_000, kv_format=KVFormat.BF16)
    runner.open(buffer)
    try:
        assert runner.num_blocks == 100_000 // runner.layout.block_bytes
        assert runner.buffer.nbytes == runner.num_blocks * runner.layout.block_bytes
        runner.run(BatchPlan([Row("a", [1, 2, 3], 0, [7], None)]))
        size = runner.layout.block_bytes
        written = buffer.read(7 * size, size)
        assert any(written)
        assert written == bytes(runner.buffer[7 * size : 8 * size])
    finally:
        runner.close()
        buffer.close()


def test_building_a_runner_touches_no_file(tmp_path):
    runner = TorchRunner(tmp_path / "nowhere", num_blocks=1)
    with pytest.raises(CheckpointError, match="no such directory"):
        runner.open()


def test_kv_memory_is_sized_when_the_model_is_loaded(tmp_path_factory):
    found = []

    def size(needs):
        found.append(needs)
        return 5 * needs.block_bytes

    path = tiny_checkpoint(tmp_path_factory, "llama")
    runner = TorchRunner(path, block_size=BLOCK_SIZE, kv_bytes=size, max_len=100)
    runner.open()
    (needs,) = found
    assert (runner.num_blocks, runner.context_len, needs.num_context_blocks) == (5, 100, 25)
    assert needs.block_bytes == runner.layout.block_bytes
    assert needs.weights_bytes >= runner.weights_bytes


def test_a_limit_beyond_the_context_is_refused(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    runner = TorchRunner(path, num_blocks=1, max_len=513)
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model's context is 512"):
        runner.open()


@pytest.mark.parametrize("memory", [{}, {"kv_bytes": 100}, {"num_blocks": 0}])
def test_a_pool_without_blocks_is_refused(memory, tmp_path_factory):
    with pytest.raises(ConfigError, match="block"):
        TorchRunner(tiny_checkpoint(tmp_path_factory, "llama"), **memory).open()


def test_warm_up_takes_time_and_fits_the_smallest_pool(llama, tmp_path_factory):
    assert 0 < llama.warm_up() < 10
    small = TorchRunner(tiny_checkpoint(tmp_path_factory, "llama"), block_size=2, num_blocks=1)
    small.open()
    small.warm_up()
