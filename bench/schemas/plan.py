"""The plan of one `bench schemas`: which schemas of a suite are tried. Pure, but for reading files.

A suite is a folder of JSON files, each in one of these forms:

    {"schema": …, "tests": [{"data": …, "valid": true}, …]}     MaskBench; so is a list of them
    any other object                                            a schema, without tests

The part of a file's name before `---`, else the name of its folder, is its dataset.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.common.report import Scalar
from engine.errors import ConfigError

DATASET_MARK = "---"
MAX_TESTS = 20  # of one schema
MAX_TEST_LEN = 20_000  # characters


@dataclass(frozen=True, slots=True)
class SchemaTest:
    """A text in JSON that a schema allows or forbids."""

    text: str
    is_valid: bool


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """One schema, as text, with its tests."""

    dataset: str
    name: str
    schema: str
    tests: tuple[SchemaTest, ...] = ()


@dataclass(frozen=True, slots=True)
class SchemasPlan:
    """Everything that is run."""

    suite: Path
    tokenizer: Path
    eos: int
    num_schemas: int = 1000  # drawn from the suite; 0: all
    num_walks: int = 2  # random texts for each schema
    deadline_s: float = 5.0  # for one schema and one engine
    seed: int = 0


def config_of(plan: SchemasPlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report. Paths are names only."""
    return {
        "suite": plan.suite.name,
        "tokenizer": plan.tokenizer.parent.name,
        "num_schemas": plan.num_schemas,
        "num_walks": plan.num_walks,
        "deadline_s": plan.deadline_s,
    }


def cases_of(plan: SchemasPlan) -> list[SchemaCase]:
    """The schemas to try, in the order of their names. Raises ConfigError."""
    files = sorted(plan.suite.rglob("*.json"))
    if plan.num_schemas and plan.num_schemas < len(files):
        files = sorted(Random(plan.seed).sample(files, plan.num_schemas))
    if not files:
        raise ConfigError(f"{plan.suite} holds no JSON files")
    return [case for file in files for case in _cases_in(file)]


def _cases_in(file: Path) -> Iterator[SchemaCase]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from error
    dataset, mark, _ = file.stem.partition(DATASET_MARK)
    dataset = dataset if mark else file.parent.name
    several = content if isinstance(content, list) else [content]
    for index, each in enumerate(several):
        name = file.stem if len(several) == 1 else f"{file.stem}/{index}"
        if isinstance(each, dict) and "schema" in each and isinstance(each.get("tests"), list):
            schema, tests = each["schema"], tuple(_tests_of(each["tests"]))[:MAX_TESTS]
            yield SchemaCase(dataset, name, json.dumps(schema, ensure_ascii=False), tests)
        else:
            yield SchemaCase(dataset, name, json.dumps(each, ensure_ascii=False))


def _tests_of(tests: list[Any]) -> Iterator[SchemaTest]:
    for test in tests:
        if isinstance(test, dict) and "data" in test and isinstance(test.get("valid"), bool):
            text = json.dumps(test["data"], ensure_ascii=False)
            if len(text) <= MAX_TEST_LEN:
                yield SchemaTest(text, test["valid"])
