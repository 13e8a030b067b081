"""A draft model's K and V are transferred in the target's blocks, with the bytes of the draft
alone.

The draft model never proposes here, but its KV must be ready for proposals.
"""

import json
import random
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat
from engine.errors import CheckpointError
from engine.layout import KVFormat, KVSection
from engine.messages import Sampling
from engine.model import runner as runner_module
from engine.model.cuda import CudaForward
from engine.model.loading.checkpoint import load
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row
from tests.kits.checkpoints import COMMON, KINDS, VOCAB_SIZE, save_checkpoint, tiny_checkpoint
from tests.kits.models.sequences import SharedBuffer, as_on_a_gpu, scattered

pytestmark = pytest.mark.torch

NUM_BLOCKS = 60
BLOCK_SIZE = 4
NUM_NEW_TOKENS = 9
SAMPLING = Sampling(temperature=0.9, seed=5)
BUNDLED = BUNDLED_MODEL.parent
PAIRS = (  # target, draft: one C++ call computes both or only one; heads differ
    ("llama", "qwen3"),
    ("gemma2", "gpt_neox"),
    ("mixtral", "gemma"),
)
FUSED_KINDS = ("llama", "qwen3", "gemma", "gemma2")
FORMATS = (
    (WeightFormat.INT8, KVFormat.INT8),
    (WeightFormat.INT8, KVFormat.INT4),
    (WeightFormat.FP32, KVFormat.FP32),
)


@pytest.fixture
def open_runner():
    """Opens runners, and closes them at the end of the test."""
    runners = []

    def open_one(path, **options):
        options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS} | options
        runners.append(TorchRunner(path, **options))
        runners[-1].open()
        return runners[-1]

    yield open_one
    for runner in runners:
        runner.close()


def section_bytes(runner, section):
    """Returns the bytes of one section of every block, [num_blocks, section_bytes]."""
    blocks = torch.frombuffer(runner.buffer, dtype=torch.uint8)
    begin, end = (runner.layout.section_offset_bytes(i) for i in (section, section + 1))
    return blocks.view(runner.num_blocks, -1)[:, begin:end].clone()


def record_of(runner, table, num_tokens):
    """Returns the blocks' contents for a sequence's first tokens: both models, K, V and scales."""
    found = []
    for forward in (runner._forward, runner.draft_forward):
        kept = forward._loaded.context.cache
        for layers in (kept.keys, kept.values, kept.key_scales, kept.value_scales):
            for stored in layers or ():
                tokens = stored[table].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
                found.append(tokens.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def prompts(*lengths):
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


def generate(runner, texts, tables, *, chunk=1000, start=0):
    """Returns the answers to all texts, and the plans that were run. Prompts are computed in
    chunks, then answers token by token in common batches. The blocks of each text already have its
    first `start` tokens.
    """
    sequences = [list(text) for text in texts]
    done = [start] * len(texts)
    plans = []
    while any(len(s) < len(t) + NUM_NEW_TOKENS for s, t in zip(sequences, texts, strict=True)):
        rows = []
        for i, sequence in enumerate(sequences):
            begin, done[i] = done[i], min(done[i] + chunk, len(sequence))
            sampling = SAMPLING if done[i] == len(sequence) else None
            ids = sequence[begin : done[i]]
            rows.append(Row(f"s{i}", ids, begin, tables[i], sampling, draft_token_ids=ids))
        plans.append(BatchPlan(rows))
        for sequence, token in zip(sequences, runner.run(plans[-1]).tokens, strict=True):
            sequence.extend(() if token is None else (token,))
    return [s[len(t) :] for s, t in zip(sequences, texts, strict=True)], plans


scattered = partial(scattered, num_blocks=NUM_BLOCKS)


def check_both_sections(pair, target, draft):
    """Runs batches of ragged rows. Each byte of each section, and every token, must equal the
    results of the section's model alone.
    """
    texts = prompts(1, 11, 23)
    answers, plans = generate(pair, texts, scattered(3), chunk=7)
    assert len({token for answer in answers for token in answer}) > 5
    for plan in plans:
        draft.run(plan)
    assert generate(target, texts, scattered(3), chunk=7) == (answers, plans)
    assert section_bytes(draft, 0).any()
    assert torch.equal(section_bytes(pair, 0), section_bytes(target, 0))
    assert torch.equal(section_bytes(pair, 1), section_bytes(draft, 0))


@pytest.mark.parametrize("kinds", PAIRS, ids="+".join)
@pytest.mark.parametrize(("weights", "kv_format"), FORMATS)
def test_each_section_holds_what_its_model_stores_alone(
    tmp_path_factory, open_runner, kinds, weights, kv_format
):
    target_path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in kinds)
    options = {"weights": weights, "kv_format": kv_format}
    pair = open_runner(target_path, draft=draft_path, **options)
    target, draft = (open_runner(path, **options) for path in (target_path, draft_path))
    are_fused = target.is_fused, draft.is_fused
    assert are_fused == tuple(kind in FUSED_KINDS for kind in kinds)
    assert pair.is_fused == all(are_fused)
    check_both_sections(pair, target, draft)


def test_each_section_holds_what_its_model_stores_as_a_gpu_computes(
    tmp_path_factory, open_runner, monkeypatch
):
    """Uses the code for GPUs on a CPU: packed steps, and padded decode steps."""
    monkeypatch.setattr(runner_module, "_forward", as_on_a_gpu((4,)))
    target_path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in PAIRS[0])
    options = {"weights": WeightFormat.FP32}
    runners = [
        open_runner(target_path, draft=draft_path, **options),
        open_runner(target_path, **options),
        open_runner(draft_path, **options),
    ]
    passes = [*(runner._forward for runner in runners), runners[0].draft_forward]
    assert {type(forward) for forward in passes} == {CudaForward}
    check_both_sections(*runners)


@pytest.mark.parametrize("kinds", PAIRS, ids="+".join)
def test_chunks_and_prefixes_change_no_byte_of_either_section(tmp_path_factory, open_runner, kinds):
    target_path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in kinds)
    pair = open_runner(target_path, draft=draft_path, kv_format=KVFormat.INT8)
    (text,) = prompts(6 * BLOCK_SIZE + 1)
    first, second, third = scattered(3)
    answers, _ = generate(pair, [text], [first])
    stored = record_of(pair, first, len(text))
    assert generate(pair, [text], [second], chunk=5)[0] == answers
    assert record_of(pair, second, len(text)) == stored
    shared = first[:4] + third
    assert generate(pair, [text], [shared], start=4 * BLOCK_SIZE)[0] == answers
    assert record_of(pair, shared, len(text)) == stored


def test_another_worker_continues_both_sections_of_a_record(tmp_path_factory, open_runner):
    """The hand-over: other block ids, a pool of another size, and whole blocks copied as bytes."""
    path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in PAIRS[0])
    options = {"draft": draft_path, "kv_format": KVFormat.INT4}
    source, sink = (open_runner(path, num_blocks=n, **options) for n in (NUM_BLOCKS, 23))
    draft = open_runner(draft_path, kv_format=KVFormat.INT4)
    assert source.layout == sink.layout
    assert source.fingerprint == sink.fingerprint
    (text,) = prompts(5 * BLOCK_SIZE - 2)
    (here,), (there,) = scattered(1), scattered(1, seed=3, num_blocks=23)
    (first,) = source.run(
        BatchPlan([Row("a", text, 0, here, SAMPLING, draft_token_ids=text)])
    ).tokens
    size = source.layout.block_bytes
    for ours, theirs in zip(here[:5], there[:5], strict=True):
        block = source.buffer[ours * size : (ours + 1) * size]
        sink.buffer[theirs * size : (theirs + 1) * size] = block

    answers, _ = generate(source, [[*text, first]], [here], start=len(text))
    assert generate(sink, [[*text, first]], [there], start=len(text))[0] == answers
    num_tokens = len(text) + NUM_NEW_TOKENS
    assert record_of(sink, there, num_tokens) == record_of(source, here, num_tokens)

    last = Row("a", [first], len(text), there, None)
    whole = Row("a", [*text, first], 0, here, None)
    with torch.inference_mode():
        found = sink.draft_forward.logits([last], [0])
        expected = draft._forward.logits([whole], [len(text)])
    assert torch.equal(found, expected)  # the worker can draft, because no KV was missing


def test_the_fingerprint_depends_on_the_draft(tmp_path_factory, tmp_path, open_runner):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    drafts = [tiny_checkpoint(tmp_path_factory, "qwen3"), tmp_path]
    save_checkpoint(tmp_path, COMMON | KINDS["qwen3"], seed=1)
    alone = open_runner(path)
    pairs = [open_runner(path, draft=draft) for draft in drafts]
    assert len({runner.fingerprint for runner in (alone, *pairs)}) == 3
    assert pairs[0].layout == pairs[1].layout
    loaded = load(path, kv_format=KVFormat.FP32, block_size=BLOCK_SIZE)
    assert alone.layout == loaded.layout
    assert alone.fingerprint == f"{loaded.fingerprint}-{alone.weights}"
    assert alone.draft_forward is None


def test_a_draft_with_a_shorter_context_shortens_the_served_context(
    tmp_path_factory, tmp_path, open_runner
):
    save_checkpoint(tmp_path, COMMON | KINDS["qwen3"] | {"max_position_embeddings": 48})
    path = tiny_checkpoint(tmp_path_factory, "llama")
    assert open_runner(path, draft=tmp_path).context_len == 48
    assert open_runner(tmp_path, draft=path).context_len == 48


def test_a_missing_draft_is_named_as_the_draft(tmp_path_factory, tmp_path):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    runner = TorchRunner(path, draft=tmp_path / "nowhere", num_blocks=1)
    with pytest.raises(CheckpointError, match=r"^draft: .*nowhere: no such directory$"):
        runner.open()


def test_a_draft_with_a_larger_vocabulary_is_refused(tmp_path_factory, tmp_path):
    save_checkpoint(tmp_path, COMMON | KINDS["qwen3"] | {"vocab_size": VOCAB_SIZE + 4})
    runner = TorchRunner(tiny_checkpoint(tmp_path_factory, "llama"), draft=tmp_path, num_blocks=1)
    with pytest.raises(CheckpointError, match=rf"^draft: .* {VOCAB_SIZE + 4} .* {VOCAB_SIZE}$"):
        runner.open()


def test_a_draft_with_a_different_tokenizer_is_refused(tmp_path_factory, tmp_path):
    save_checkpoint(tmp_path, COMMON | KINDS["qwen3"])
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    runner = TorchRunner(tiny_checkpoint(tmp_path_factory, "llama"), draft=tmp_path, num_blocks=1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not the tokens of .*llama$"):
        runner.open()


def test_a_format_that_the_drafts_heads_do_not_fit_is_refused(tmp_path_factory, tmp_path):
    """Each head has nine elements."""
    save_checkpoint(tmp_path, COMMON | {"model_type": "gpt_neox", "hidden_size": 36})
    path = tiny_checkpoint(tmp_path_factory, "llama")
    runner = TorchRunner(path, draft=tmp_path, num_blocks=1, kv_format=KVFormat.INT4)
    with pytest.raises(CheckpointError, match=r"^draft: .*head_dim is 9: int4 needs an even"):
        runner.open()


def test_a_step_times_the_draft_separately(tmp_path_factory, open_runner, monkeypatch):
    class Clock:
        now = 0.0

        def now_s(self):
            return self.now

    path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in PAIRS[0])
    pair = open_runner(path, draft=draft_path)
    clock = pair._clock = Clock()
    launch = pair.draft_forward.launch

    def launch_slowly(prepared):
        clock.now += 5.0
        return launch(prepared)

    monkeypatch.setattr(pair.draft_forward, "launch", launch_slowly)
    row = Row("a", [1, 2], 0, [0], SAMPLING, draft_token_ids=[1, 2])
    times = pair.run(BatchPlan([row])).times
    assert times.draft_s == 5.0
    assert 0 < times.forward_s < 1.0


def test_the_targets_threads_compute_the_draft_too(tmp_path_factory, open_runner):
    def num_threads():
        return len(list(Path("/proc/self/task").iterdir()))

    path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in PAIRS[0])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        open_runner(path)  # also starts torch's own threads
        started = [num_threads()]
        for options in ({}, {"draft": draft_path}):
            open_runner(path, **options)
            started.append(num_threads())
    finally:
        torch.set_num_threads(before)
    assert [b - a for a, b in pairwise(started)] == [2, 2]


def test_kv_of_both_models_can_live_in_shared_memory_and_be_released(tmp_path_factory):
    path, draft_path = (tiny_checkpoint(tmp_path_factory, kind) for kind in PAIRS[0])
    buffer = SharedBuffer()
    runner = TorchRunner(path, draft=draft_path, block_size=BLOCK_SIZE, num_blocks=9)
    runner.open(buffer)
    try:
        runner.warm_up()
        assert all(section_bytes(runner, section).any() for section in (0, 1))
    finally:
        runner.close()
        buffer.close()


def test_the_bundled_pair_fits(open_runner):
    target, draft = (BUNDLED / name for name in ("target", "draft"))
    pair = open_runner(target, draft=draft)
    assert pair.layout.sections == (KVSection(6, 2, 64), KVSection(2, 2, 64))
    assert pair.is_fused
    answers, _ = generate(pair, prompts(9), scattered(1))
    assert generate(open_runner(target), prompts(9), scattered(1))[0] == answers
