"""Runs `bench schemas`: every engine on every schema, one after the other."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Self

import typer
from tokenizers import Tokenizer

from bench.common.command import peer_option
from bench.common.options import environment_of_peers, peers_named
from bench.common.progress import Say
from bench.common.report import Scalar
from bench.lab.experiment import Experiment, Findings
from bench.lab.schemas.cases import SchemaCase, cases_of
from bench.lab.schemas.figures import Judged, SchemasMeasured, reasons, results, warnings
from bench.lab.schemas.ours import NAME
from bench.processes.driven import Answer, Driven, DrivenFailed
from deploy.base.defaults import BUNDLED_MODEL
from engine.errors import ConfigError

DRIVER = Path(__file__).parents[2] / "peers" / "schemas_driver.py"
PEERS = ("llguidance", "xgrammar")
BUNDLED = BUNDLED_MODEL / "tokenizer.json"
QUICK_SCHEMAS = 100
NUM_REASONS = 10
ENDS = ("<|endoftext|>", "<|eot_id|>", "<|im_end|>", "</s>", "<EOT>", "<eos>")
START_TIMEOUT_S = 60.0
SAY_EVERY = 100  # schemas
VALIDATOR = (sys.executable, "-m", "bench.lab.schemas.validator")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemasStudy(Experiment):
    """Measure how many JSON schemas are followed, how truly, and at what cost."""

    NAME: ClassVar = "schemas"
    QUICK: ClassVar = f"At most {QUICK_SCHEMAS} schemas."

    suite: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of schemas, with tests.")
    ]
    tokenizer: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="tokenizer.json.", show_default="bundled"),
    ] = BUNDLED
    schemas: Annotated[int, typer.Option(min=0, help="Drawn from the suite; 0: all.")] = 1000
    deadline_s: Annotated[
        float, typer.Option(min=0.1, help="For one schema and one engine; longer is a failure.")
    ] = 5.0
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None
    num_walks: int = 2  # random texts for each schema

    @property
    def title(self) -> str:
        """Returns the line above the table."""
        return f"schemas of {self.suite.name}"

    def quick(self) -> Self:
        """Returns a study of few schemas."""
        return replace(self, schemas=min(self.schemas or QUICK_SCHEMAS, QUICK_SCHEMAS))

    def config(self) -> dict[str, Scalar]:
        """Returns the options, with the names of paths."""
        names = {"suite": self.suite.name, "tokenizer": self.tokenizer.parent.name}
        return names | Experiment.config(self)

    def measure(self, say: Say) -> Findings:
        """Raises ConfigError, and DrivenFailed if an engine does not start."""
        if find_spec("jsonschema") is None:
            raise ConfigError("jsonschema is not installed: pip install 'baton-serve[bench]'")
        measured = self.run(say)
        refused = reasons(measured.of(NAME))[:NUM_REASONS]
        lines = [f"refused {count} times: {reason}" for reason, count in refused]
        versions = {f"{name}_version": v for name, v in measured.versions.items() if v}
        found = results(measured)
        return Findings(found, [*lines, *warnings(measured)], config=versions)

    def run(self, say: Say) -> SchemasMeasured:
        """Tries every engine on every schema."""
        cases = cases_of(self.suite, self.schemas, self.seed)
        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        options = ["--tokenizer", str(self.tokenizer), "--eos", str(_eos_of(tokenizer))]
        judged: list[Judged] = []
        with ExitStack() as stack:
            engines = [
                _Engine(
                    NAME, [sys.executable, "-m", "bench.lab.schemas.ours", NAME, *options], stack
                )
            ]
            for peer in peers_named(self.peer or (), PEERS):
                command = [str(peer.python), str(DRIVER), peer.name, *options]
                engines.append(_Engine(peer.name, command, stack, is_peer=True))
            validator = _Engine("validator", VALIDATOR, stack)
            for number, case in enumerate(cases, 1):
                tests = [
                    tokenizer.encode(test.text, add_special_tokens=False).ids for test in case.tests
                ]
                for engine in engines:
                    judged.append(_judged(engine, case, tests, self, tokenizer, validator))
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
    study: SchemasStudy,
    tokenizer: Tokenizer,
    validator: _Engine,
) -> Judged:
    try:
        answer = engine.ask(
            "judge",
            study.deadline_s,
            schema=case.schema,
            tests=tests,
            num_walks=study.num_walks,
            seed=study.seed,
        )
    except DrivenFailed as error:
        return Judged(engine.name, case, failure=error.reason)
    if "refused" in answer:
        return Judged(engine.name, case, refusal=str(answer["refused"]))
    walks = [walk for walk in answer["walks"] if walk is not None]
    texts = [tokenizer.decode(walk, skip_special_tokens=False) for walk in walks]
    try:
        valid = validator.ask("validate", study.deadline_s, schema=case.schema, texts=texts)[
            "valid"
        ]
    except DrivenFailed:  # a schema that the library cannot read, or a pattern without end
        valid = []
    return Judged(
        engine.name,
        case,
        compile_s=float(answer["compile_s"]),
        masks_us=tuple(answer["masks_us"]),
        allowed=tuple(answer["allowed"]),
        num_walks=study.num_walks,
        walks=tuple(zip(texts, valid, strict=False)),
    )


def _eos_of(tokenizer: Tokenizer) -> int:
    """The token that ends a text. Raises ConfigError."""
    found = (tokenizer.token_to_id(name) for name in ENDS)
    eos = next((token_id for token_id in found if token_id is not None), None)
    if eos is None:
        raise ConfigError(f"the tokenizer has none of the tokens {', '.join(ENDS)}")
    return eos
