"""The options of `bench speculate`, its setups, workloads, cells and prompts.

A setup is a target with a draft, in its own process:

    bundled        the bundled models
    <shape>        a target of that shape and a draft of its parts (see `bench.common.shapes`)
    <shape>_bad    the same target, and a draft with unrelated weights

A workload runs with every mode of speculation. The run without speculation is first or last, in
turn:

    text, text_sampled       Python code, and questions that ask for code        bundled
    random, random_sampled   random tokens                                       shapes
    repeat                   a prompt, its answer with some tokens replaced,     all but bad
                             and the prompt again: most of the answer follows

Answers are greedy or sampled at temperature 0.7. Answers to random tokens hardly repeat themselves,
and sampled answers do not, so n-grams find few drafts. A *cell* is a workload, a batch size and a
mode.

Speed is measured only while the whole batch decodes. The time begins with the step after the last
sequence had its first token. It ends when one sequence has all its tokens. Such a batch takes a
tenth of a second. So a run of a cell has many batches, with all modes in turn, until the batches
without speculation have taken `least_s` together. The worker process is reused for all cells.

Text is from files that the bundled models were not trained on (`bench.quality.corpus`): beginnings
of source files, and questions that ask for a function. The seed determines all prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Self

import msgspec
import typer
from tokenizers import Tokenizer

from bench.common.command import RepeatOption, numbers_of
from bench.common.options import check_choices
from bench.common.prompts import PromptShape, token_prompts
from bench.common.report import hardware
from bench.common.shapes import SHAPES, shape_named
from bench.engine.plan import KV_OF_WEIGHTS
from bench.lab.experiment import Experiment
from bench.lab.speculate.worker import CoreAsk
from bench.quality import corpus
from engine.config import Speculate, WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Grammar, GrammarKind, Sampling

BUNDLED = "bundled"
NUM_PROMPTS = 32
PROMPT_LEN = 64
TEMPERATURE = 0.7
EDIT_EVERY = 16  # on average, one token in this many is replaced in an earlier answer
MAX_DRAFT_TOKENS = 8
LEAST_S = 0.5  # least seconds of decoding without speculation in one run of a cell
MOST_ROUNDS = 61  # most batches in one run; odd, because the order of modes changes with each batch
CALIBRATED_LENS = (0, 1, 2, 4, 8)  # draft lengths whose passes are timed alone
QUICK_TOKENS = 16
QUICK_IDENTITY = 40
QUICK_PROMPTS = 8

# Least promised values, which are the limits of results with these names.
GOALS = {
    "speedup/draft_b1": 1.6,
    "speedup/draft_b8": 1.2,
    "speedup/ngram_repeat_b1": 2.0,
    "speedup/worst": 0.97,
    "identical_share": 1.0,
}


class PromptKind(StrEnum):
    """The source of the prompts of a workload."""

    TEXT = "text"
    RANDOM = "random"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class SpeculateWorkload:
    """Prompts of one kind, answered at one temperature."""

    kind: PromptKind
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """Returns the workload's name in results."""
        return f"{self.kind}_sampled" if self.temperature else str(self.kind)


@dataclass(frozen=True, slots=True)
class SpeculateSetup:
    """A target, a draft, and the workloads that they run."""

    name: str
    shape: str | None  # None: the bundled models
    agrees: bool  # True: the draft was made for this target
    workloads: tuple[SpeculateWorkload, ...]

    @property
    def modes(self) -> tuple[Speculate, ...]:
        """Returns the modes whose results can differ. N-grams do not use the draft model, so only
        one setup of a target measures them.
        """
        if self.agrees:
            return tuple(Speculate)
        return (Speculate.OFF, Speculate.DRAFT, Speculate.AUTO)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload of a setup with one batch size. It is measured in all modes of the setup."""

    setup: SpeculateSetup
    workload: SpeculateWorkload
    batch: int

    @property
    def thing(self) -> str:
        """Returns the names of setup and workload, as results contain them."""
        return f"{self.setup.name}_{self.workload.name}"

    def name(self, mode: str) -> str:
        """Returns the remaining part of a result's name."""
        return f"{self.thing}/{mode}_b{self.batch}"


SETUPS = ("bundled", "shape", "bad")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatePlan(Experiment):
    """The options of the study, with the values that depend on them."""

    NAME: ClassVar = "speculate"
    QUICK: ClassVar = "One run of shorter answers: under 50 s."

    setups: Annotated[str, typer.Option(help="Which pairs of models to measure.")] = ",".join(
        SETUPS
    )
    shape: Annotated[
        str, typer.Option(help=f"Random weights that draft for themselves: {', '.join(SHAPES)}.")
    ] = "88m"
    weights: Annotated[WeightFormat, typer.Option(help="fp32, bf16 or int8.")] = WeightFormat.INT8
    threads: Annotated[int | None, typer.Option(min=1, show_default="all cores")] = None
    batches: Annotated[str, typer.Option(help="Sequences at once.")] = "1,8,32"
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer that is timed.")] = 64
    identity: Annotated[
        int, typer.Option(min=0, help="Requests whose answers are compared between modes.")
    ] = 200
    repeat: RepeatOption = 5

    def __post_init__(self) -> None:
        """Raises ConfigError, which names the wrong option."""
        shape_named(self.shape)
        check_choices("--setups", [name for name in self.setups.split(",") if name], SETUPS)
        if not self.sizes or min(self.sizes) < 1:
            raise ConfigError("--batches must be positive")
        if self.weights not in (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8):
            raise ConfigError(f"--weights must be fp32, bf16 or int8, not {self.weights}")

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        runs = "once" if self.repeat == 1 else f"{self.repeat} times"
        return f"speculation with {self.weights} weights: {self.num_threads} threads, each {runs}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the batch sizes."""
        return numbers_of("--batches", self.batches)

    @property
    def num_threads(self) -> int:
        """Returns the number of the worker's threads."""
        return self.threads or hardware().num_cores

    @property
    def least_s(self) -> float:
        """Returns the least seconds of decoding without speculation in one run of a cell."""
        return 0.0 if self.is_quick else LEAST_S

    @property
    def num_prompts(self) -> int:
        """Returns the number of prompts of a workload. A larger batch repeats prompts."""
        return QUICK_PROMPTS if self.is_quick else NUM_PROMPTS

    @property
    def kv_format(self) -> KVFormat:
        """Returns the KV format that is used with these weights."""
        return KV_OF_WEIGHTS.get(self.weights, KVFormat.FP32)

    def quick(self) -> Self:
        """Returns a study that takes under 50 s on two cores: greedy answers, and only drafts that
        agree.
        """
        setups = ",".join(name for name in self.setups.split(",") if name != "bad")
        return replace(
            self,
            setups=setups or self.setups,
            repeat=1,
            tokens=min(self.tokens, QUICK_TOKENS),
            identity=min(self.identity, QUICK_IDENTITY),
            is_quick=True,
        )

    def setups_of(self) -> list[SpeculateSetup]:
        """Returns the setups, each with its workloads."""
        both = (0.0,) if self.is_quick else (0.0, TEMPERATURE)
        repeat = SpeculateWorkload(PromptKind.REPEAT)
        text = tuple(SpeculateWorkload(PromptKind.TEXT, temperature) for temperature in both)
        random = tuple(SpeculateWorkload(PromptKind.RANDOM, temperature) for temperature in both)
        shape, bad = self.shape, f"{self.shape}_bad"
        known = {
            "bundled": SpeculateSetup(BUNDLED, None, agrees=True, workloads=(*text, repeat)),
            "shape": SpeculateSetup(shape, shape, agrees=True, workloads=(*random, repeat)),
            "bad": SpeculateSetup(bad, shape, agrees=False, workloads=random[:1]),
        }
        return [known[name] for name in SETUPS if name in self.setups.split(",")]

    def cells_of(self, setup: SpeculateSetup) -> list[Cell]:
        """Returns all cells in the order of their measurement."""
        return [Cell(setup, workload, b) for workload in setup.workloads for b in self.sizes]


def prompts_for(cell: Cell, count: int, *, turn: int) -> list[int]:
    """Returns the indices of this batch's prompts, out of `count` prompts. They differ in each
    turn.
    """
    return [(turn * cell.batch + i) % count for i in range(cell.batch)]


def order_of_modes(modes: Sequence[Speculate], turn: int) -> list[Speculate]:
    """Returns the modes in the order of one turn. The order varies, so that drift affects all modes
    alike.
    """
    return [*modes[::-1]] if turn % 2 else [*modes]


NUM_DOCUMENTS = 100  # number of held-out documents that are read; reading all of them takes seconds
MOST_REPEATED = 96  # most tokens of an earlier answer in a prompt
FEWEST_REPEATED = 16
IDENTITY_TOKENS = (16, 48)  # tokens of the answers that are compared between modes
NUM_CHOICES = 3  # choices of a request with n > 1; choice i uses the request's seed plus i

GRAMMARS = (
    Grammar(GrammarKind.REGEX, r"[a-z_]{1,12}\([a-z, ]{0,20}\)"),
    Grammar(
        GrammarKind.JSON_SCHEMA,
        '{"type":"object","properties":{"name":{"type":"string","maxLength":12},'
        '"sizes":{"type":"array","items":{"type":"integer","minimum":0,"maximum":999},'
        '"maxItems":3}},"required":["name","sizes"],"additionalProperties":false}',
    ),
)

Tokens = list[int]


@lru_cache(maxsize=1)
def text_prompts(tokenizer_file: Path, count: int, seed: int) -> list[Tokens]:
    """Returns prompts of code and prompts with questions, alternately."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    code, questions = [], []
    for document in islice(_held_out(), NUM_DOCUMENTS):
        if document.is_dialogue:
            question, turn, _ = document.text.partition(corpus.TURNS[-1])
            questions.append(_encoded(tokenizer, question + turn))
        else:
            code.append(_encoded(tokenizer, document.text))
    rng = Random(f"{seed}/text")
    prompts: list[Tokens] = []
    for asked in rng.sample(questions, k=count // 2):
        prompts += [_cut(rng.choice(code), rng), asked]
    return prompts


def random_prompts(vocab_size: int, count: int, seed: int) -> list[Tokens]:
    """Returns prompts of random tokens. No two prompts share a prefix."""
    shape = PromptShape(num_prompts=count, input_len=PROMPT_LEN)
    drawn = token_prompts(range(vocab_size), shape, Random(f"{seed}/random"))
    return [[*prompt] for prompt in drawn]


def repeating_asks(
    prompts: Sequence[Tokens],
    answers: Sequence[Tokens],
    *,
    end_token_ids: Sequence[int],
    num_tokens: int,
    seed: int,
) -> list[CoreAsk]:
    """Returns requests that consist of a prompt, its edited answer, and the prompt again. They
    request as many tokens as that answer has.
    """
    rng = Random(f"{seed}/repeat")
    vocab = sorted({token for answer in answers for token in answer} - set(end_token_ids))
    asks = []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = until_end(answer, end_token_ids)[:MOST_REPEATED]
        if len(whole) >= FEWEST_REPEATED:
            earlier = [*prompt, *edited(whole, vocab, rng), *end_token_ids[-1:]]
            asks.append(CoreAsk([*earlier, *prompt], min(num_tokens, len(whole))))
    return asks


def until_end(answer: Sequence[int], end_token_ids: Sequence[int]) -> Tokens:
    """Returns an answer up to the first token that ends it."""
    ends = (i for i, token in enumerate(answer) if token in end_token_ids)
    return [*answer[: next(ends, len(answer))]]


def edited(answer: Sequence[int], vocab: Sequence[int], rng: Random) -> Tokens:
    """Returns a copy of an answer in which some tokens are replaced."""
    return [rng.choice(vocab) if rng.randrange(EDIT_EVERY) == 0 else token for token in answer]


def identity_asks(
    prompts: Sequence[Tokens], count: int, *, end_token_ids: Sequence[int], seed: int
) -> list[CoreAsk]:
    """Returns requests of all kinds, including requests with several choices."""
    rng = Random(f"{seed}/identity")
    asks: list[CoreAsk] = []
    while len(asks) < count:
        prompt = [*rng.choice(prompts)]
        num_tokens, sampling = rng.randint(*IDENTITY_TOKENS), _sampling(rng)
        min_tokens = rng.choice((0, 0, num_tokens // 2))
        if sampling.grammar is not None:
            min_tokens = 0  # the grammar decides when the answer may end
        for choice in range(rng.choice((1, 1, NUM_CHOICES))):
            own = _with_seed(sampling, sampling.seed + choice)
            asks.append(CoreAsk(prompt, num_tokens, own, tuple(end_token_ids), min_tokens))
    return asks[:count]


def _sampling(rng: Random) -> Sampling:
    penalised = rng.random() < 1 / 3
    return Sampling(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 0, 40)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        seed=rng.randrange(2**32),
        repetition_penalty=rng.choice((1.0, 1.2)) if penalised else 1.0,
        presence_penalty=rng.choice((0.0, 0.5)) if penalised else 0.0,
        frequency_penalty=rng.choice((0.0, 0.4)) if penalised else 0.0,
        logit_bias=((rng.randrange(200, 400), rng.uniform(-5, 5)),) if rng.random() < 0.2 else (),
        grammar=rng.choice(GRAMMARS) if rng.random() < 0.2 else None,
    )


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)


def _held_out() -> Iterator[corpus.Document]:
    return (d for d in corpus.documents(corpus.standard_library()) if d.held_out)


def _encoded(tokenizer: Tokenizer, text: str) -> Tokens:
    return [*tokenizer.encode(text, add_special_tokens=False).ids]


def _cut(stream: Tokens, rng: Random) -> Tokens:
    """Returns a part of a file, from a random position."""
    start = rng.randrange(max(1, len(stream) - PROMPT_LEN))
    return stream[start : start + PROMPT_LEN]
