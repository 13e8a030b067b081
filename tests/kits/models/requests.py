"""Random requests of every kind to the bundled model, and the comparison of their answers."""

import random
from itertools import pairwise

from deploy.base.defaults import BUNDLED_MODEL
from engine.grammar.tokens import TokenRules
from engine.messages import Grammar, GrammarKind, Sampling
from tests.kits.models.pools import Asked

NUM_BLOCKS = 1024
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
TEXTS = ("import os\n", "def f(", "class A:\n    def __init__(self", "    return ", "for i in ")
EOS = (0, 1)
RULES = TokenRules(
    tuple(range(600)), tuple((i, j) for i in range(200, 300) for j in range(0, 600, 3))
)


def requests(num_requests: int, seed: int) -> list[Asked]:
    """Returns requests with random sampling options, grammars and lengths; some share a prompt."""
    from router.text.tokenizer import load_text_model

    text = load_text_model(BUNDLED_MODEL)
    rng = random.Random(seed)
    asked: list[Asked] = []
    while len(asked) < num_requests:
        prompt = text.encode_text(rng.choice(TEXTS) * rng.randint(1, 9), 4096)
        sampling = _sampling(rng)
        stops = () if rng.random() < 0.3 else EOS
        for i in range(rng.choice((1, 1, 1, 3))):  # the number of choices
            each = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
            asked.append(
                Asked(
                    tuple(prompt),
                    Sampling(**{**each, "seed": sampling.seed + i}),
                    max_tokens=rng.randint(1, 32),
                    min_tokens=rng.choice((0, 0, 1)),
                    stop_token_ids=EOS if sampling.grammar is not None else stops,
                )
            )
    return asked[:num_requests]


def _sampling(rng: random.Random) -> Sampling:
    penalised, biased = rng.random() < 0.3, rng.random() < 0.2
    grammar = None
    if rng.random() < 0.2:
        grammar = rng.choice(
            (
                Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
                Grammar(GrammarKind.REGEX, "[a-z]{3,30}"),
                RULES.grammar(),
            )
        )
    return Sampling(
        temperature=rng.choice((0.0, 0.0, 0.5, 1.0, 1.5)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        min_p=rng.choice((0.0, 0.05)),
        seed=rng.getrandbits(32),
        repetition_penalty=1.2 if penalised else 1.0,
        frequency_penalty=0.4 if penalised else 0.0,
        presence_penalty=-0.3 if penalised else 0.0,
        logit_bias=((11, 3.0), (200, -5.0)) if biased else (),
        grammar=grammar,
        logprobs=rng.choice((None, None, 2)),
    )


def check(found: list[Asked], expected: list[Asked]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.answer == other.answer, one.sampling
        assert one.logprobs == other.logprobs
        assert one.is_finished
        if one.sampling.grammar == RULES.grammar():
            assert set(one.answer) <= set(RULES.allowed)
            assert not set(pairwise(one.answer)) & set(RULES.banned)
