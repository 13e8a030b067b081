"""Prompts of `bench speculate`, and the requests whose answers must agree in all modes.

Text is what the bundled models were not trained on (`bench.quality.corpus`): beginnings of
source files, and questions that ask for a function. Everything is a function of the seed.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random

import msgspec
from tokenizers import Tokenizer

from bench.common.prompts import PromptShape, token_prompts
from bench.lab.speculate.plan import EDIT_EVERY, PROMPT_LEN
from bench.lab.speculate.worker import CoreAsk
from bench.quality import corpus
from engine.messages import Grammar, GrammarKind, Sampling

NUM_DOCUMENTS = 100  # held-out ones; to read all of them takes seconds
MOST_REPEATED = 96  # tokens of an earlier answer
FEWEST_REPEATED = 16
IDENTITY_TOKENS = (16, 48)  # in an answer that modes must agree on
NUM_CHOICES = 3  # in a request with n > 1: choice i has the seed of the first plus i

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
    """Code and questions in turn."""
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
    """Random tokens; no two prompts begin alike."""
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
    """Returns requests of a prompt, its edited answer and the prompt again; they request as many
    tokens as that answer.
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
    """An answer up to the first token that ends it."""
    ends = (i for i, token in enumerate(answer) if token in end_token_ids)
    return [*answer[: next(ends, len(answer))]]


def edited(answer: Sequence[int], vocab: Sequence[int], rng: Random) -> Tokens:
    """Returns an earlier version of an answer: some tokens are replaced."""
    return [rng.choice(vocab) if rng.randrange(EDIT_EVERY) == 0 else token for token in answer]


def identity_asks(
    prompts: Sequence[Tokens], count: int, *, end_token_ids: Sequence[int], seed: int
) -> list[CoreAsk]:
    """Requests of all kinds, those with several choices included."""
    rng = Random(f"{seed}/identity")
    asks: list[CoreAsk] = []
    while len(asks) < count:
        prompt = [*rng.choice(prompts)]
        num_tokens, sampling = rng.randint(*IDENTITY_TOKENS), _sampling(rng)
        min_tokens = rng.choice((0, 0, num_tokens // 2))
        if sampling.grammar is not None:
            min_tokens = 0  # the grammar itself says when the answer may end
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
    """A piece of a file, from anywhere."""
    start = rng.randrange(max(1, len(stream) - PROMPT_LEN))
    return stream[start : start + PROMPT_LEN]
