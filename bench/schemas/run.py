"""Runs `bench schemas`: every engine on every schema, one after the other."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tokenizers import Tokenizer

from bench.common.options import PeerProgram, environment_of_peers
from bench.common.progress import Say, say_nothing
from bench.processes.driven import Answer, Driven, DrivenFailed
from bench.schemas.ours import NAME
from bench.schemas.plan import SchemaCase, SchemasPlan, cases_of
from bench.schemas.results import Judged, SchemasMeasured

DRIVER = Path(__file__).parents[1] / "peers" / "schemas_driver.py"
PEERS = ("llguidance", "xgrammar")
START_TIMEOUT_S = 60.0
SAY_EVERY = 100  # schemas
VALIDATOR = (sys.executable, "-m", "bench.schemas.validator")


def measure(
    plan: SchemasPlan, peers: Sequence[PeerProgram], say: Say = say_nothing
) -> SchemasMeasured:
    """Carries out the plan. Raises ConfigError, and DrivenFailed if an engine does not start."""
    cases = cases_of(plan)
    tokenizer = Tokenizer.from_file(str(plan.tokenizer))
    options = ["--tokenizer", str(plan.tokenizer), "--eos", str(plan.eos)]
    judged: list[Judged] = []
    with ExitStack() as stack:
        engines = [
            _Engine(NAME, [sys.executable, "-m", "bench.schemas.ours", NAME, *options], stack)
        ]
        for peer in peers:
            command = [str(peer.python), str(DRIVER), peer.name, *options]
            engines.append(_Engine(peer.name, command, stack, is_peer=True))
        validator = _Engine("validator", VALIDATOR, stack)
        for number, case in enumerate(cases, 1):
            tests = [
                tokenizer.encode(test.text, add_special_tokens=False).ids for test in case.tests
            ]
            for engine in engines:
                judged.append(_judged(engine, case, tests, plan, tokenizer, validator))
            if number % SAY_EVERY == 0:
                say(f"{number} of {len(cases)} schemas")
    versions = {engine.name: engine.version for engine in engines}
    return SchemasMeasured(tuple(cases), tuple(judged), versions)


class _Engine:
    """A driven engine that is started again when it died or was too slow."""

    def __init__(
        self, name: str, command: Sequence[str], stack: ExitStack, *, is_peer: bool = False
    ) -> None:
        self.name = name
        self.version = ""
        self._command = command
        self._environment = environment_of_peers() if is_peer else None
        self._driven: Driven | None = None
        stack.callback(self.close)
        self._start()

    def close(self) -> None:
        if self._driven is not None:
            self._driven.close()

    def ask(self, do: str, timeout_s: float, **arguments: object) -> Answer:
        """Returns an answer. Raises DrivenFailed, after which the engine runs anew."""
        assert self._driven is not None
        try:
            return self._driven.ask(do, timeout_s=timeout_s, **arguments)
        except DrivenFailed:
            if self._driven.session is None:
                self._start()
            raise

    def _start(self) -> None:
        self.close()
        self._driven = Driven(self.name, self._command, self._environment)
        self._driven.start()
        self.version = str(self._driven.ready(START_TIMEOUT_S).get("version", ""))


def _judged(
    engine: _Engine,
    case: SchemaCase,
    tests: list[list[int]],
    plan: SchemasPlan,
    tokenizer: Tokenizer,
    validator: _Engine,
) -> Judged:
    try:
        answer = engine.ask(
            "judge",
            plan.deadline_s,
            schema=case.schema,
            tests=tests,
            num_walks=plan.num_walks,
            seed=plan.seed,
        )
    except DrivenFailed as error:
        return Judged(engine.name, case, failure=error.reason)
    if "refused" in answer:
        return Judged(engine.name, case, refusal=str(answer["refused"]))
    walks = [walk for walk in answer["walks"] if walk is not None]
    texts = [tokenizer.decode(walk, skip_special_tokens=False) for walk in walks]
    try:
        valid = validator.ask("validate", plan.deadline_s, schema=case.schema, texts=texts)["valid"]
    except DrivenFailed:  # a schema that the library cannot read, or a pattern without end
        valid = []
    return Judged(
        engine.name,
        case,
        compile_s=float(answer["compile_s"]),
        masks_us=tuple(answer["masks_us"]),
        allowed=tuple(answer["allowed"]),
        num_walks=plan.num_walks,
        walks=tuple(zip(texts, valid, strict=False)),
    )
