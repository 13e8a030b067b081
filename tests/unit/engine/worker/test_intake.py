"""Invalid messages, which would crash a worker's runner."""

import msgspec
import pytest

from engine.errors import GrammarError
from engine.messages import (
    Decode,
    GatewayId,
    Generate,
    GivenBack,
    Grammar,
    GrammarKind,
    Incarnation,
    LeaseId,
    LeaseRef,
    Limits,
    Prefill,
    Sampling,
    SeqId,
    TransferAddress,
    WorkerId,
)
from engine.worker.intake import Intake

LEASE = LeaseRef(LeaseId("a"), TransferAddress(WorkerId("w"), Incarnation("1"), "tcp://w"), 1)
INF, NAN = float("inf"), float("nan")


class Guides:
    def open(self, grammar, answer, salt=b""):
        if grammar.source == "bad":
            raise GrammarError("no such thing")
        return (grammar.source, list(answer))


INTAKE = Intake(4, Guides(), vocab_size=50, context_len=100)


def prefill(token_ids=(1, 2, 3), *, num_top=None, limits=None, **sampling) -> Prefill:
    limits = {"max_len": 10, "prompt_len": 3} | (limits or {})
    return Prefill(
        SeqId("a"), list(token_ids), Sampling(**sampling), Limits(**limits), prompt_logprobs=num_top
    )


def outcome(message, intake=INTAKE):
    """Returns the sequence, or the reason why it is refused."""
    opened = intake.open(GatewayId("g"), message)
    return opened.reason if isinstance(opened, GivenBack) else opened


TOKEN = "a token id is not in the vocabulary"
PROMPT = "the prompt is longer than the tokens"
CONTEXT = "the answer may exceed the context"
LOGPROBS = "that many log-probabilities are not available"
SAMPLING = "a parameter of sampling is out of range"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (prefill([1, 50, 2]), TOKEN),
        (prefill(limits={"stop_token_ids": (50,)}), TOKEN),
        (prefill(limits={"stop_token_ids": (-1,)}), TOKEN),
        (prefill(logit_bias=((50, 1.0),)), TOKEN),
        (prefill(limits={"prompt_len": 4}), PROMPT),
        (prefill(limits={"prompt_len": -1}), PROMPT),
        (prefill(limits={"max_len": 101}), CONTEXT),
        (prefill(range(40), limits={"max_len": 3}), None),
        (prefill([1] * 101, limits={"max_len": 3}), CONTEXT),
        (prefill(logprobs=-1), LOGPROBS),
        (prefill(logprobs=50), LOGPROBS),
        (prefill(num_top=50), LOGPROBS),
        (prefill(temperature=NAN), SAMPLING),
        (prefill(temperature=-1.0), SAMPLING),
        (prefill(top_p=INF), SAMPLING),
        (prefill(top_k=-1), SAMPLING),
        (prefill(top_k=2**31), SAMPLING),
        (prefill(seed=2**64), SAMPLING),
        (prefill(seed=-1), SAMPLING),
        (prefill(repetition_penalty=0.0), SAMPLING),
        (prefill(repetition_penalty=INF), SAMPLING),
        (prefill(frequency_penalty=NAN), SAMPLING),
        (prefill(logit_bias=((3, NAN),)), SAMPLING),
        (prefill(seed=2**64 - 1, logprobs=20, num_top=0, logit_bias=((3, -100.0),)), None),
    ],
)
@pytest.mark.parametrize("kind", [Prefill, Generate, Decode])
def test_requests_the_runner_cannot_compute_are_given_back(message, reason, kind):
    fields = msgspec.structs.asdict(message)
    if kind is Decode:
        if fields.pop("prompt_logprobs") == 50:
            return  # a decode worker does not score prompts
        fields["prefix"], fields["lease"] = None, LEASE
        del fields["prefix"]
    found = outcome(kind(**fields))
    assert found == reason if reason else found.token_ids == message.token_ids


def test_without_bounds_only_requests_no_runner_can_compute_are_given_back():
    intake = Intake(4)
    assert outcome(prefill([2**31]), intake) == TOKEN
    assert outcome(prefill([2**31 - 1], limits={"prompt_len": 1}), intake).token_ids


def test_a_grammar_is_opened_with_the_answer_so_far():
    grammar = Grammar(GrammarKind.REGEX, "x")
    assert outcome(prefill([1, 2, 3, 4, 5], grammar=grammar)).guide == ("x", [4, 5])
    assert outcome(prefill(grammar=grammar)).guide == ("x", [])
    assert outcome(prefill()).guide is None


def test_a_grammar_that_cannot_be_followed_gives_the_sequence_back():
    bad = prefill(grammar=Grammar(GrammarKind.REGEX, "bad"))
    assert outcome(bad) == "grammar: no such thing"
    assert (
        outcome(bad, Intake(4, vocab_size=50, context_len=100))
        == "grammar: this worker follows no grammars"
    )


def test_a_sequence_uses_the_guide_that_the_shell_opened():
    message = prefill(grammar=Grammar(GrammarKind.REGEX, "x"))
    assert INTAKE.open(GatewayId("g"), message, "guide").guide == "guide"
    refused = INTAKE.open(GatewayId("g"), message, GrammarError("too large"))
    assert (refused.reason, refused.hopeless) == ("grammar: too large", True)
