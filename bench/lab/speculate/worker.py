"""Worker cores without sockets, in a process that `bench.lab.speculate.study` drives.

    python -m bench.lab.speculate.worker '{"target": …}'   (the fields of `CoreOptions`, as JSON)

Each mode of speculation has its own core of a mixed worker, with the schedulers and the speculator
of a real worker. A core exists for the whole life of the process, and keeps its measured costs and
acceptance. The cores share two runners: one with the target only, and one with target and draft.
Only one core works at a time, so the cores of a runner also share the runner's blocks.

The time of a step includes all its parts: the choice of rows and drafts, the passes, and the
processing of their results.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from bench.peers.driver import drive, stdout_for_answers
from decode.speculation import Speculator
from deploy.worker.core import WorkerCore
from engine.clock import MonotonicClock
from engine.config import DeviceKind, Speculate, WeightFormat, WorkerConfig
from engine.devices.settings import resolve
from engine.grammar.guide import Guides
from engine.grammar.guides import LlGuides
from engine.layout import KVFormat
from engine.messages import (
    Cancel,
    GatewayId,
    Generate,
    GivenBack,
    Incarnation,
    Limits,
    PrefillDone,
    Role,
    Sampling,
    SeqId,
    ToGateway,
    Tokens,
    TransferAddress,
    WorkerId,
)
from engine.worker.batch import BatchPlan, BatchResult, Row, Runner
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import Effect, Emit, FromGateway
from engine.worker.intake import Intake

DEFAULTS = resolve(WorkerConfig(), DeviceKind.CPU)
GATEWAY = GatewayId("bench")
NOWHERE = TransferAddress(WorkerId("bench"), Incarnation("bench"), "")
GREEDY = Sampling(temperature=0.0)
PASSES_S = 0.3  # seconds for which the passes of a batch size are timed
FEWEST_TIMES = 3

_clock = MonotonicClock()


class CoreOptions(msgspec.Struct, frozen=True):
    """Models and sizes of the process."""

    target: str
    draft: str
    weights: WeightFormat
    kv_format: KVFormat
    num_threads: int
    kv_tokens: int  # KV tokens of each runner
    max_draft_tokens: int


class CoreAsk(msgspec.Struct, frozen=True, array_like=True):
    """One request of the study."""

    prompt: list[int]
    num_tokens: int
    sampling: Sampling = GREEDY
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def limits(self) -> Limits:
        """Returns the limits of the answer's length."""
        begin = len(self.prompt)
        return Limits(
            max_len=begin + self.num_tokens,
            min_len=begin + self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            prompt_len=begin,
        )


@dataclass(frozen=True, slots=True)
class CoreStep:
    """One step of a core, with its times in seconds."""

    begin_s: float
    end_s: float
    run_s: float  # seconds in the runner
    plan: BatchPlan
    result: BatchResult
    messages: list[ToGateway]


@dataclass(slots=True)
class Answers:
    """The answers of some requests so far, and counts of their drafts."""

    wanted: list[SeqId]
    token_ids: dict[SeqId, list[int]] = field(default_factory=dict)
    finished: set[SeqId] = field(default_factory=set)
    # number of rows by (drafted tokens, accepted tokens)
    drafts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def record(self, messages: Sequence[ToGateway]) -> None:
        """Records the messages that a step sends."""
        for message in messages:
            match message:
                case PrefillDone(seq_id, token, finish):
                    self.token_ids[seq_id] = [token]
                case Tokens(seq_id, token_ids, finish):
                    self.token_ids[seq_id] += token_ids
                    self.drafts[message.num_drafted, message.num_accepted] += 1
                case _:
                    continue
            if finish is not None:
                self.finished.add(seq_id)

    @property
    def all_have_begun(self) -> bool:
        """Returns True if each answer has its first token."""
        return len(self.token_ids) == len(self.wanted)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of all answers together."""
        return sum(map(len, self.token_ids.values()))

    def in_order(self) -> list[list[int]]:
        """Returns the tokens of each answer, in order of the requests."""
        return [self.token_ids[seq_id] for seq_id in self.wanted]


class MixedCore:
    """The core of a mixed worker. The caller submits requests and runs each step."""

    def __init__(self, runner: Any, pool: BlockPool, *, speculator: Speculator, guides: Guides):
        self._runner = runner
        intake = Intake(runner.layout.block_size, guides, runner.vocab_size, runner.context_len)
        self.core = WorkerCore(
            pool,
            DEFAULTS,
            intake=intake,
            address=NOWHERE,
            role=Role.MIXED,
            speculator=speculator,
        )
        self._names = (SeqId(str(number)) for number in count())

    def submit(self, asks: Sequence[CoreAsk]) -> list[SeqId]:
        """Submits requests. Returns their sequence ids."""
        seq_ids = []
        for ask in asks:
            seq_id = next(self._names)
            message = Generate(seq_id, ask.prompt, ask.sampling, ask.limits)
            _no_refusal(self.core.handle(FromGateway(GATEWAY, message)))
            seq_ids.append(seq_id)
        return seq_ids

    def cancel(self, seq_ids: Sequence[SeqId]) -> None:
        """Cancels requests."""
        for seq_id in seq_ids:
            self.core.handle(FromGateway(GATEWAY, Cancel(seq_id)))

    def step(self) -> CoreStep:
        """Runs one step and returns its times."""
        begin_s = _clock.now_s()
        plan, effects = self.core.plan(begin_s)
        messages = _no_refusal(effects)
        assert plan is not None, "nothing to compute"
        planned_s = _clock.now_s()
        result = self._runner.run(plan)
        ran_s = _clock.now_s()
        messages += _no_refusal(self.core.finish(result, ran_s))
        return CoreStep(begin_s, _clock.now_s(), ran_s - planned_s, plan, result, messages)


def _no_refusal(effects: Sequence[Effect]) -> list[ToGateway]:
    """Returns the messages to the gateway. Asserts that no sequence was refused: without enough
    memory the benchmark would be invalid.
    """
    messages = [effect.message for effect in effects if isinstance(effect, Emit)]
    for message in messages:
        if isinstance(message, GivenBack):
            raise RuntimeError(f"a sequence was given back: {message}")
    return messages


class Bench:
    """The cores of all modes. Its other methods are the commands of the process."""

    def __init__(self, options: CoreOptions) -> None:
        import torch

        torch.set_num_threads(options.num_threads)
        self._options = options
        self._alone = _opened(options, draft=None)
        self._paired = _opened(options, draft=Path(options.draft))
        self._pools = {id(r): BlockPool(r.num_blocks) for r in (self._alone, self._paired)}
        guides = LlGuides(
            Path(options.target) / "tokenizer.json",
            vocab_size=self._alone.vocab_size,
            eos_token_ids=self._alone.eos_token_ids,
        )
        self._services = {mode: self._service(mode, guides) for mode in Speculate}
        self.facts: dict[str, object] = {
            "version": torch.__version__,
            "eos_token_ids": self._alone.eos_token_ids,
            "vocab_size": self._alone.vocab_size,
        }

    def generate(self, mode: str, asks: list[Any]) -> dict[str, object]:
        """Answers all requests completely, with as many at a time as a worker runs."""
        return {"answers": self._generate(self._services[Speculate(mode)], _asks(asks))}

    def prime(self, asks: list[Any]) -> dict[str, object]:
        """Computes prompts in both runners, so that later requests find the prompts cached."""
        once = [msgspec.structs.replace(ask, num_tokens=1) for ask in _asks(asks)]
        for mode in (Speculate.OFF, Speculate.DRAFT):
            self._generate(self._services[mode], once)
        return {}

    def decode(self, mode: str, asks: list[Any]) -> dict[str, object]:
        """Times decoding. The time begins with the step after the last request had its first token.
        It ends when one request has all its tokens; drafts may exceed this number.
        """
        service, wanted = self._services[Speculate(mode)], _asks(asks)
        answers = Answers(service.submit(_with_room(wanted, self._options.max_draft_tokens)))
        while not answers.all_have_begun:
            answers.record(service.step().messages)
        answers.drafts.clear()
        num_before = answers.num_tokens
        steps: list[CoreStep] = []
        while not _one_is_complete(answers, wanted):
            steps.append(service.step())
            answers.record(steps[-1].messages)
        service.cancel(answers.wanted)
        service.core.validate()
        if not steps:
            raise RuntimeError("an answer was complete before the last one had begun")
        return {
            "seconds": steps[-1].end_s - steps[0].begin_s,
            "outside_s": sum(step.end_s - step.begin_s - step.run_s for step in steps),
            "num_tokens": answers.num_tokens - num_before,
            "steps": [_described(step) for step in steps],
            "drafts": [[*key, rows] for key, rows in sorted(answers.drafts.items())],
            "answers": answers.in_order(),
        }

    def passes(self, batch: int, context_len: int, lens: list[int]) -> dict[str, object]:
        """Returns the seconds of single passes of `batch` sequences.

        There are plain passes, passes that verify drafts of these lengths, and passes that propose
        drafts. Call this before other commands: it overwrites blocks, so all blocks must be free.
        """
        assert all(pool.counts().free == pool.num_blocks for pool in self._pools.values())
        num_blocks = self._alone.layout.num_blocks_for(context_len + max(lens) + 1)
        row = partial(_row, context_len=context_len, num_blocks=num_blocks)
        plans = [BatchPlan([row(i, num_to_draft=num) for i in range(batch)]) for num in lens]
        without = BatchPlan([row(i) for i in range(batch)])
        plain: list[float] = []
        verify: list[list[float]] = [[] for _ in lens]
        draft: list[list[float]] = [[] for _ in lens]
        end_s = _clock.now_s() + PASSES_S
        while _clock.now_s() < end_s or len(plain) < FEWEST_TIMES:
            # not timed: it loads the other runner's weights into the caches
            self._alone.run(without)
            plain.append(_timed_s(self._alone, without)[0])
            self._paired.run(without)
            for plan, verify_s, draft_s in zip(plans, verify, draft, strict=True):
                whole_s, drafting_s = _timed_s(self._paired, plan)
                verify_s.append(whole_s - drafting_s)
                draft_s.append(drafting_s)
        return {
            "plain_s": statistics.median(plain),
            "verify_s": [*map(statistics.median, verify)],
            "draft_s": [*map(statistics.median, draft)],
        }

    def _service(self, mode: Speculate, guides: Guides) -> MixedCore:
        """Builds the core of a worker with this mode."""
        has_draft_model = mode in (Speculate.DRAFT, Speculate.AUTO)
        runner = self._paired if has_draft_model else self._alone
        speculator = Speculator(
            mode,
            max_draft_tokens=self._options.max_draft_tokens,
            has_draft_model=has_draft_model,
        )
        return MixedCore(runner, self._pools[id(runner)], speculator=speculator, guides=guides)

    def _generate(self, service: MixedCore, asks: Sequence[CoreAsk]) -> list[list[int]]:
        answers = Answers([])
        waiting = list(asks)[::-1]
        while waiting or len(answers.finished) < len(asks):
            room = DEFAULTS.max_running - len(answers.wanted) + len(answers.finished)
            for _ in range(min(room, len(waiting))):
                answers.wanted += service.submit([waiting.pop()])
            answers.record(service.step().messages)
        service.core.validate()
        return answers.in_order()


def _opened(options: CoreOptions, draft: Path | None) -> Any:
    from engine.model.runner import TorchRunner

    runner = TorchRunner(
        Path(options.target),
        draft=draft,
        block_size=DEFAULTS.block_size,
        kv_format=options.kv_format,
        num_blocks=-(-options.kv_tokens // DEFAULTS.block_size),
        weights=options.weights,
    )
    runner.open()
    runner.warm_up()
    return runner


def _asks(asks: list[Any]) -> list[CoreAsk]:
    return msgspec.convert(asks, list[CoreAsk])


def _with_room(asks: Sequence[CoreAsk], num_tokens: int) -> list[CoreAsk]:
    """Returns the requests with longer answers, because drafts get shorter near the end of an
    answer.
    """
    return [msgspec.structs.replace(ask, num_tokens=ask.num_tokens + num_tokens) for ask in asks]


def _one_is_complete(answers: Answers, asks: Sequence[CoreAsk]) -> bool:
    return any(
        len(answers.token_ids[seq_id]) >= ask.num_tokens
        for seq_id, ask in zip(answers.wanted, asks, strict=True)
    )


def _described(step: CoreStep) -> list[float]:
    """Returns a step's seconds, rows, verified draft tokens, and passes of the draft model."""
    return [
        step.end_s - step.begin_s,
        len(step.plan.rows),
        sum(result.num_drafted for result in step.result.rows),
        max(row.num_to_draft for row in step.plan.rows),
    ]


def _row(index: int, *, context_len: int, num_blocks: int, num_to_draft: int = 0) -> Row:
    """Returns a decode row with its own blocks. The contents of the blocks do not matter."""
    blocks = range(index * num_blocks, (index + 1) * num_blocks)
    return Row(
        seq_id=SeqId(str(index)),
        token_ids=[index],
        start=context_len,
        block_table=[BlockId(block) for block in blocks],
        sampling=GREEDY,
        num_to_draft=num_to_draft,
        draft_token_ids=[index] if num_to_draft else (),
    )


def _timed_s(runner: Runner, plan: BatchPlan) -> tuple[float, float]:
    """Runs a step. Returns its seconds, and the seconds of the draft model in it."""
    begin_s = _clock.now_s()
    times = runner.launch(plan).result().times
    assert times is not None
    return _clock.now_s() - begin_s, times.draft_s


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    options = msgspec.json.decode(sys.argv[1], type=CoreOptions)
    drive(lambda: Bench(options), sys.stdin, out)


if __name__ == "__main__":
    main()
