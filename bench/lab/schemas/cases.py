"""The schemas of a suite. Pure, but for reading files.

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

from engine.errors import ConfigError

DATASET_MARK = "---"
MAX_TESTS = 20  # for one schema
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


def cases_of(suite: Path, number: int, seed: int) -> list[SchemaCase]:
    """Draws schemas of a suite; 0: all. Returns them by name. Raises ConfigError."""
    files = sorted(suite.rglob("*.json"))
    if number and number < len(files):
        files = sorted(Random(seed).sample(files, number))
    if not files:
        raise ConfigError(f"{suite} holds no JSON files")
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
