"""docs/users/tuning.md names settings that exist, with their true defaults."""

import re
from enum import StrEnum
from pathlib import Path

import pytest

from engine.config import UNSET, Config

PAGE = Path(__file__).parents[3] / "docs/users/tuning.md"
ROW = re.compile(r"^\| `(\w+)\.(\w+)` \| `([^`]*)` \|", re.MULTILINE)
WHOLE_SECTIONS = ("worker", "router", "planner")  # sections whose settings must all be on the page


def text_of(value: object) -> str:
    if value is None:
        return UNSET
    if isinstance(value, StrEnum):
        return value.value
    return str(value).lower() if isinstance(value, bool) else str(value)


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(PAGE.read_text())


@pytest.mark.parametrize(("section", "name", "default"), rows())
def test_the_page_gives_the_true_default_of_each_setting(section, name, default):
    assert default == text_of(getattr(getattr(Config(), section), name))


@pytest.mark.parametrize("section", WHOLE_SECTIONS)
def test_the_page_has_every_setting_of_a_section_once(section):
    named = [name for where, name, _ in rows() if where == section]
    assert sorted(named) == sorted(getattr(Config(), section).__struct_fields__)
