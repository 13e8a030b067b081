"""The plan of `bench schemas`, what a driven engine is asked, and what the results make of it."""

import json

import numpy as np
import pytest

from bench.lab.schemas.cases import SchemaCase, SchemaTest, cases_of
from bench.lab.schemas.figures import Judged, SchemasMeasured, reasons, results, warnings
from bench.lab.schemas.ours import NAME
from bench.lab.schemas.study import SchemasStudy
from bench.peers.schemas_driver import Judge, closing_tokens
from engine.errors import ConfigError

EOS = 0


@pytest.fixture
def suite(tmp_path):
    folder = tmp_path / "suite" / "mine"
    folder.mkdir(parents=True)
    tested = {"schema": {"type": "null"}, "tests": [{"data": None, "valid": True}, {"data": 1}]}
    for name, content in (
        ("easy---one.json", tested),
        ("bare.json", {"type": "string"}),
        ("list.json", [tested, tested]),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder.parent


def test_files_are_schemas_with_tests_or_without(suite):
    cases = cases_of(suite, 0, 0)
    assert [(case.dataset, case.name, len(case.tests)) for case in cases] == [
        ("mine", "bare", 0),
        ("easy", "easy---one", 1),
        ("mine", "list/0", 1),
        ("mine", "list/1", 1),
    ]
    assert cases[1].tests == (SchemaTest("null", is_valid=True),)
    assert cases_of(suite, 1, 0) == cases_of(suite, 1, 0)
    assert SchemasStudy(suite=suite).config()["suite"] == "suite"


def test_a_folder_without_schemas_and_a_wrong_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no JSON"):
        cases_of(tmp_path, 0, 0)
    (tmp_path / "wrong.json").write_text("{")
    with pytest.raises(ConfigError, match=r"wrong\.json"):
        cases_of(tmp_path, 0, 0)


class OneWord:
    """Allows the tokens 1, 2, 3 in this order, and then an end."""

    def __init__(self):
        self.facts = {"version": "7"}
        self.place = 0

    def check(self, schema):
        if schema == "false":
            raise ValueError("nothing\nat all")

    def compile(self, schema):
        return OneWord

    def mask(self):
        token_id = self.place + 1 if self.place < 3 else EOS
        return np.array([1 << token_id], dtype=np.uint32)

    def accept(self, token_id):
        assert token_id == self.place + 1
        self.place += 1


def test_an_engine_is_tried_on_tests_and_walked():
    judge = Judge(OneWord(), EOS, closing=[2])
    answer = judge.judge("true", [[1, 2, 3], [1, 2], [2]], num_walks=2, seed=0)
    assert answer["allowed"] == [True, False, False]
    assert answer["walks"] == [[1, 2, 3], [1, 2, 3]]
    assert len(answer["masks_us"]) == 4 + 3 + 1
    assert judge.judge("false", [], 1, 0) == {"refused": "ValueError: nothing at all"}


def test_tokens_that_close_something_are_known(tmp_path):
    vocabulary = {'"': 0, "a": 1, '"}': 2, ",": 3, "]a": 4}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert closing_tokens(str(file)) == [0, 2, 3]


TESTS = (SchemaTest("null", is_valid=True), SchemaTest("1", is_valid=False))
CASE = SchemaCase("easy", "a", "{}", TESTS)
RIGHT = Judged(
    NAME,
    CASE,
    compile_s=0.002,
    masks_us=(5.0, 7.0),
    allowed=(True, False),
    num_walks=2,
    walks=(("null", True),),
)


def found_in(*judged):
    measured = SchemasMeasured((CASE,), judged)
    return {result.name: result for result in results(measured)}


def test_figures_are_shares_and_percentiles():
    refused = Judged(NAME, CASE, refusal="GrammarError: oneOf: no (at #/a)")
    found = {name: result.value for name, result in found_in(RIGHT, refused).items()}
    assert found["schemas/accepted"] == found["schemas/passing"] == found["accepted/easy"] == 50
    assert found["tests/allowed"] == found["tests/refused"] == found["walks/valid"] == 100
    assert found["walks/ended"] == 50
    assert found["compile/50th"] == 2.0
    assert found["mask/99th"] == pytest.approx(7.0, abs=0.1)


def test_peers_are_beside_ours():
    theirs = Judged("xgrammar", CASE, allowed=(True, True), compile_s=0.004, masks_us=(1.0,))
    found = found_in(RIGHT, theirs)
    assert found["schemas/accepted"].peers["xgrammar"].value == 100
    assert found["compile/50th"].peers["xgrammar"].ratio == 0.5
    assert "xgrammar" not in found["tests/refused"].peers  # zero has no ratio


def test_faults_and_missed_goals_are_named():
    wrong = Judged(NAME, CASE, allowed=(True, True), walks=(("1", False),), num_walks=1)
    dead = Judged("xgrammar", CASE, failure="it ended with status -11")
    refused = Judged(NAME, CASE, refusal="GrammarError: oneOf: no (at #/a)")
    lines = warnings(SchemasMeasured((CASE,), (wrong, refused, dead)))
    assert lines == [
        "50.0 % of schemas are accepted; the goal is 90 %",
        "invalid tests are allowed by 1 schemas: a",
        "walks give invalid texts for 1 schemas: a",
        "xgrammar died or was too slow for 1: a",
    ]
    assert reasons([refused, refused, wrong]) == [("GrammarError: oneOf: no", 2)]
    assert warnings(SchemasMeasured((CASE,), (RIGHT,))) == []
