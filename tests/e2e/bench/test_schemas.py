"""`bench schemas` with real engines in processes of their own, on a few schemas."""

import json
import sys

from bench.common.progress import say_nothing
from bench.lab.schemas.figures import results, warnings
from bench.lab.schemas.study import SchemasStudy

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CASES = {
    "people---person": (PERSON, {"name": "a", "age": 3}, {"age": 3}),
    "people---either": ({"oneOf": [PERSON, {"type": "null"}]}, None, 1),
    "hard---repeated": ({"type": "array", "uniqueItems": True}, [1], [1, 1]),
}


def test_engines_are_measured_side_by_side(tmp_path):
    for name, (schema, good, bad) in CASES.items():
        tests = [{"data": good, "valid": True}, {"data": bad, "valid": False}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": tests}))
    study = SchemasStudy(suite=tmp_path, num_walks=4, peer=[f"llguidance={sys.executable}"])
    measured = study.run(say_nothing)
    found = {result.name: result for result in results(measured)}
    assert found["accepted/people"].value == 100
    assert found["accepted/hard"].value == 0
    assert found["schemas/passing"].value > 60
    assert found["tests/refused"].value == found["walks/valid"].value == 100
    assert found["mask/50th"].value > 0
    assert found["compile/50th"].peers["llguidance"].value > 0
    assert measured.versions["llguidance"]
    [line] = warnings(measured)  # one of three is refused
    assert "the goal is" in line
