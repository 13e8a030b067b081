"""Text that the target itself writes, with the target's distribution at every token.

A draft is evaluated on the target's own text, so it is trained on such text (on-policy
distillation, Zhou et al., "DistillSpec", ICLR 2024). The target runs on Baton's own code:
`TorchRunner` writes, `CpuForward` scores.

    window    a prompt and the target's continuation, past any end of text, up to a fixed number of
              tokens; no two share a seed
    lesson    for each token of a window, the `TOP` likeliest tokens after it

Prompts are pieces of code, and questions in the chat template. A few windows are long and contain
only code: writing them is slow, but they teach attention over long distances.
"""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.clock import Clock
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.messages import Sampling, SeqId
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cpu import CpuForward, resolve_weights
from engine.model.loading.checkpoint import load
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId

TOP = 64
BLOCK_SIZE = 16
MAX_ROWS = 64  # largest batch of a decode step
SCORED_TOKENS = 1024  # minimum number of tokens whose logits are in memory at once
MIN_PROMPT, MAX_PROMPT_SHARE = 16, 0.75
QUESTION_SHARE = 0.3
WINDOW, LONG_WINDOW = 512, 2048
LONG_PER_BATCH = 2
TEMPERATURES = (0.0, 0.7, 0.7, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Written:
    """Windows [num_windows, window] int64. The target wrote the tokens from `prompt_lens` on."""

    windows: torch.Tensor
    prompt_lens: list[int]
    samplings: list[Sampling]


@dataclass(frozen=True, slots=True)
class Lessons:
    """Windows [num_windows, window], and the likeliest next tokens after each token, best first.

    `top_ids` and `top_logprobs` are [num_windows, window, TOP], of the distribution at temperature
    1.
    """

    windows: torch.Tensor  # int16 is enough for ids below 32,768
    top_ids: torch.Tensor  # int16, [num_windows, window, TOP]
    top_logprobs: torch.Tensor  # fp16, [num_windows, window, TOP]

    @property
    def window(self) -> int:
        """The number of tokens of each window."""
        return self.windows.shape[1]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all windows."""
        return self.windows.numel()

    @classmethod
    def joined(cls, parts: "Sequence[Lessons]") -> "Lessons":
        """Joins several lessons whose windows have the same length."""
        return cls(
            torch.cat([part.windows for part in parts]),
            torch.cat([part.top_ids for part in parts]),
            torch.cat([part.top_logprobs for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Prompts:
    """The source of prompts: token streams [num_tokens] int64, and the ids that separate
    documents.
    """

    code: torch.Tensor
    dialogues: torch.Tensor
    end_of_text: int
    answer_begins: int

    def draw(self, num: int, window: int, rng: random.Random) -> list[list[int]]:
        """Returns prompts that leave room for an answer in `window` tokens."""
        longest = int(window * MAX_PROMPT_SHARE)
        questions = [q for q in self._questions() if MIN_PROMPT <= len(q) <= longest]
        return [
            rng.choice(questions)
            if rng.random() < QUESTION_SHARE
            else self.cut(rng.randint(MIN_PROMPT, longest), rng)
            for _ in range(num)
        ]

    def cut(self, length: int, rng: random.Random) -> list[int]:
        """Returns a random piece of code."""
        start = rng.randrange(len(self.code) - length)
        return self.code[start : start + length].tolist()

    def _questions(self) -> list[list[int]]:
        """Returns every dialogue, cut off where the answer begins."""
        starts = (self.dialogues == self.end_of_text).nonzero()[:-1, 0] + 1
        answers = (self.dialogues == self.answer_begins).nonzero()[:, 0]
        ends = answers[torch.searchsorted(answers, starts)] + 1
        return [
            self.dialogues[start:end].tolist()
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]


def gather(
    target: Path, prompts: Prompts, *, seconds: float, rng: random.Random, clock: Clock
) -> list[Lessons]:
    """Makes lessons of short and of long windows until the time is used up."""
    deadline_s = clock.now_s() + seconds
    short: list[Lessons] = []
    long: list[Lessons] = []
    with (
        closing(open_writer(target)) as writer,
        closing(Scorer(target, WINDOW)) as scorer,
        closing(Scorer(target, LONG_WINDOW)) as long_scorer,
    ):
        while not short or clock.now_s() < deadline_s:
            samplings = [
                Sampling(temperature=TEMPERATURES[n % len(TEMPERATURES)], seed=rng.getrandbits(63))
                for n in range(MAX_ROWS)
            ]
            written = write(writer, prompts.draw(MAX_ROWS, WINDOW, rng), samplings)
            short.append(scorer.lessons(written.windows))
            code = [prompts.cut(LONG_WINDOW, rng) for _ in range(LONG_PER_BATCH)]
            long.append(long_scorer.lessons(torch.tensor(code)))
    return [Lessons.joined(short), Lessons.joined(long)]


def answers(
    target: Path, prompts: Prompts, *, temperature: float, num: int, rng: random.Random
) -> Written:
    """Returns windows of `num` prompts, at most MAX_ROWS, all at one temperature."""
    samplings = [Sampling(temperature=temperature, seed=rng.getrandbits(63)) for _ in range(num)]
    with closing(open_writer(target)) as writer:
        return write(writer, prompts.draw(num, WINDOW, rng), samplings)


def open_writer(target: Path) -> TorchRunner:
    """Returns a runner for `write`, with room for a full batch of windows."""
    num_blocks = MAX_ROWS * -(-WINDOW // BLOCK_SIZE)
    runner = TorchRunner(target, block_size=BLOCK_SIZE, num_blocks=num_blocks)
    runner.open()
    return runner


def write(runner: TorchRunner, prompts: Sequence[list[int]], samplings: list[Sampling]) -> Written:
    """Continues up to MAX_ROWS prompts to WINDOW tokens each."""
    texts = [list(prompt) for prompt in prompts]
    num_blocks = -(-WINDOW // BLOCK_SIZE)
    tables = [
        [BlockId(i) for i in range(n * num_blocks, (n + 1) * num_blocks)] for n in range(len(texts))
    ]
    starts = [0] * len(texts)
    while unfinished := [n for n, text in enumerate(texts) if len(text) < WINDOW]:
        rows = [
            Row(SeqId(str(n)), texts[n][starts[n] :], starts[n], tables[n], samplings[n])
            for n in unfinished
        ]
        tokens = runner.run(BatchPlan(rows)).tokens
        for n, row, token in zip(unfinished, rows, tokens, strict=True):
            starts[n] = row.end
            texts[n].append(token)
    return Written(torch.tensor(texts), [len(prompt) for prompt in prompts], samplings)


class Scorer:
    """Computes the target's distributions over windows of one length."""

    def __init__(self, target: Path, window: int) -> None:
        self._num_rows = max(1, SCORED_TOKENS // window)
        self._num_blocks = -(-window // BLOCK_SIZE)
        loaded = load(target, kv_format=KVFormat.FP32, block_size=BLOCK_SIZE)
        buffer = allocate_buffer(loaded.layout, self._num_rows * self._num_blocks)
        weights = resolve_weights(WeightFormat.AUTO)
        self._forward = CpuForward(loaded, weights, threads=torch.get_num_threads())
        self._forward.open(KVCache(loaded.layout, buffer))

    def close(self) -> None:
        """Stops the threads that compute."""
        self._forward.close()

    def lessons(self, windows: torch.Tensor) -> Lessons:
        """Returns the likeliest tokens after each token of `windows` [num_windows, window]."""
        found = [self._top(rows.tolist()) for rows in windows.split(self._num_rows)]
        shape = (*windows.shape, TOP)
        top_logprobs, top_ids = (torch.cat(part).view(shape) for part in zip(*found, strict=True))
        return Lessons(windows.to(torch.int16), top_ids, top_logprobs)

    @torch.inference_mode()
    def _top(self, windows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities fp16 and ids int16 [num_tokens, TOP]."""
        rows = []
        for n, window in enumerate(windows):
            first = n * self._num_blocks
            table = [BlockId(i) for i in range(first, first + self._num_blocks)]
            rows.append(Row(SeqId(str(n)), window, 0, table, None))
        logits = self._forward.logits(rows, range(sum(map(len, windows))))
        top = (logits - logits.logsumexp(-1, keepdim=True)).topk(TOP)
        return top.values.to(torch.float16), top.indices.to(torch.int16)
