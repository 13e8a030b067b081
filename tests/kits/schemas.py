"""Random JSON schemas in common shapes, and random answers under a guide."""

import json
import random
import string
from datetime import datetime
from decimal import Decimal, localcontext

import numpy as np
from jsonschema import Draft202012Validator, FormatChecker

KEYS = (
    "id",
    "name",
    "größe",
    "日付",
    "is ok?",
    'a"b',
    "tags/x~y",
    "nested",
    "x1",
    "ключ",
    "url",
    "z",
)
WORDS = ("red", "green", "blå", "", "yes no", "tab\there", 'quo"te', "日本", "true", "12")
PATTERNS = (
    r"^[A-Z]{2}-\d{3}$",
    r"^(foo|bar)+$",
    r"^\w{1,8}@\w{1,8}\.(com|org)$",
    r"^#?[0-9a-fA-F]{6}$",
    r"^[^\s,]{1,10}$",
    r"\d{2}",
    r"^a|b$",
    r"^(?:[1-9]\d?|100)%$",
    r"^[^\W\d_]{0,5}\s?[A-ZÄÖ]$",
)
FORMATS = (
    "date",
    "date-time",
    "time",
    "email",
    "ipv4",
    "ipv6",
    "uuid",
    "hostname",
    "uri",
    "duration",
)


# Formats that jsonschema checks without another package. Simple checks are added below.
CHECKER = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@CHECKER.checks("date-time", raises=ValueError)
def is_date_time(text: object) -> bool:
    return not isinstance(text, str) or bool(datetime.fromisoformat(text.upper()))


@CHECKER.checks("time", raises=ValueError)
def is_time(text: object) -> bool:
    return not isinstance(text, str) or bool(datetime.fromisoformat(f"2024-02-29T{text.upper()}"))


class SchemaMaker:
    """Makes one schema whose definitions may refer to one another."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, object] = {}

    def document(self) -> dict[str, object]:
        rng = self._rng
        if rng.random() < 0.4:
            self._definitions = {name: self.schema(1) for name in rng.sample(KEYS, 2)}
        root = self._object(3) if rng.random() < 0.7 else self.schema(3)
        if self._definitions:
            root = {**root, "$defs": self._definitions}
        return root

    def schema(self, depth: int) -> dict[str, object]:
        makers = [
            (self._string, 4),
            (self._number, 3),
            (self._enum, 2),
            (self._const, 1),
            (lambda _: {"type": self._rng.choice(("boolean", "null"))}, 1),
            (lambda _: {"type": ["string", "null"], "maxLength": 5}, 1),
        ]
        if self._definitions:
            makers.append((self._reference, 2))
        if depth > 0:
            makers += [(self._object, 4), (self._array, 4), (self._any_of, 2), (self._all_of, 1)]
            makers += [(self._one_of, 1), (self._map, 1)]
        choices, weights = zip(*makers, strict=True)
        return self._rng.choices(choices, weights)[0](depth - 1)

    def _string(self, _: int) -> dict[str, object]:
        rng = self._rng
        schema: dict[str, object] = {"type": "string"}
        match rng.randrange(4):
            case 0:
                schema["pattern"] = rng.choice(PATTERNS)
            case 1:
                schema["format"] = rng.choice(FORMATS)
            case _:
                schema["maxLength"] = rng.randrange(2, 12)
                schema["minLength"] = rng.randrange(0, 3)
        return schema

    def _number(self, _: int) -> dict[str, object]:
        rng = self._rng
        if rng.random() < 0.6:
            schema: dict[str, object] = {"type": "integer"}
            low, high = sorted((rng.randrange(-2000, 2000), rng.randrange(-2000, 2000)))
            step: object = rng.choice((2, 5, 7))
        else:
            schema = {"type": "number"}
            low, high = sorted((round(rng.uniform(-9, 9), 2), round(rng.uniform(-9, 9), 2)))
            step = rng.choice((0.5, 0.25, 0.01))
        if high - low < 20:
            high += 20
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
        if rng.random() < 0.8:
            schema[rng.choice(("maximum", "exclusiveMaximum"))] = high
        if rng.random() < 0.2:
            schema["multipleOf"] = step
        return schema

    def _enum(self, _: int) -> dict[str, object]:
        rng = self._rng
        values = [*WORDS, 3, -17, 2.5, None, True, [1, "x"], {"k": "v", "n": 0}]
        return {"enum": rng.sample(values, rng.randrange(1, 6))}

    def _const(self, _: int) -> dict[str, object]:
        return {"const": self._rng.choice([*WORDS, 0, -1.25, False, [], {"a": [None]}])}

    def _reference(self, _: int) -> dict[str, object]:
        name = self._rng.choice(list(self._definitions))
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}

    def _object(self, depth: int) -> dict[str, object]:
        rng = self._rng
        names = rng.sample(KEYS, rng.randrange(1, 5))
        schema: dict[str, object] = {
            "type": "object",
            "title": "T",
            "properties": {name: self.schema(depth) for name in names},
            "required": rng.sample(names, rng.randrange(0, len(names) + 1)),
        }
        extra = rng.random()
        if extra < 0.6:
            schema["additionalProperties"] = False
        elif extra < 0.8:
            schema["additionalProperties"] = self.schema(0)
        if rng.random() < 0.1:
            schema["patternProperties"] = {"^x-[a-z]{1,4}$": self.schema(0)}
        return schema

    def _map(self, depth: int) -> dict[str, object]:
        schema = {"type": "object", "additionalProperties": self.schema(depth)}
        return {**schema, "minProperties": 1, "maxProperties": 3}

    def _array(self, depth: int) -> dict[str, object]:
        rng = self._rng
        schema: dict[str, object] = {"type": "array", "items": self.schema(depth)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [self.schema(depth) for _ in range(2)]
        schema["maxItems"] = rng.randrange(2, 5)
        schema["minItems"] = rng.randrange(0, 3)
        return schema

    def _any_of(self, depth: int) -> dict[str, object]:
        return {"anyOf": [self.schema(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _one_of(self, depth: int) -> dict[str, object]:
        tagged = [
            {"type": "object", "properties": {"kind": {"const": w}}, "required": ["kind"]}
            for w in "ab"
        ]
        for option in tagged:
            option["properties"]["value"] = self.schema(depth)
            option["additionalProperties"] = False
        return {"oneOf": tagged}

    def _all_of(self, depth: int) -> dict[str, object]:
        left, right = self._rng.sample(KEYS, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {left: self.schema(depth)}, "required": [left]},
                {"properties": {right: self.schema(depth)}, "required": [right]},
            ]
        }


def random_schema(seed: int) -> dict[str, object]:
    """Returns the schema for a seed."""
    return SchemaMaker(random.Random(seed)).document()


def faults(schema: dict[str, object], text: str) -> list[str]:
    """Returns the reasons why JSON does not validate.

    Numbers are compared exactly, not as doubles.
    """
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = Draft202012Validator(exact, format_checker=CHECKER)
    value = json.loads(text, parse_float=Decimal)
    with localcontext(prec=2_000):  # random numbers are long
        return [error.message for error in validator.iter_errors(value)]


def allowed_ids(mask: np.ndarray) -> np.ndarray:
    """Returns the ids whose bits are set in uint32 [words]."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def terseness(tokens: list[str]) -> np.ndarray:
    """Returns weights that make random answers short: closing tokens are likely, blanks
    unlikely."""
    closing = set('"}],') | set(string.digits)
    weights = [200.0 if t in closing else 5.0 if t and t[-1] in '"}]' else 1.0 for t in tokens]
    blank = [0.02 if not t.strip() else 1.0 for t in tokens]
    return np.array(weights) * np.array(blank)


def write_answer(guide, weights, rng, *, max_tokens: int, eos: list[int]) -> list[int] | None:
    """Returns random tokens that the guide allows, without the end token, or None if it gets
    stuck."""
    answer: list[int] = []
    while len(answer) < max_tokens:
        ids = allowed_ids(guide.masks(())[0])
        assert len(ids), guide.fault
        num_ending = len(np.intersect1d(ids, eos, assume_unique=True))
        if num_ending and (num_ending == len(ids) or rng.random() < 0.5):
            return answer
        likely = weights[ids].cumsum()
        token_id = int(ids[np.searchsorted(likely, rng.random() * likely[-1], side="right")])
        if token_id in eos:
            return answer
        guide.consume(token_id)
        answer.append(token_id)
    return None
