"""Guides allow exactly the texts of their grammar, on every code path."""

import contextlib
import json
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import engine.model
from engine.errors import GrammarError
from engine.grammar.guides import (
    COMPILED_BETWEEN_TRIMS,
    MAX_SOURCE_LEN,
    STATES_BYTES,
    LlGuides,
    to_lark,
)
from engine.grammar.rewriting.patterns import regex_fault
from engine.messages import Grammar, GrammarKind
from tests.kits.schemas import allowed_ids, faults, random_schema, terseness, write_answer

TOKENIZER = Path(engine.model.__path__[0]) / "bundled" / "target" / "tokenizer.json"
VOCAB_SIZE = 4096
EOS = [0, 1]
NUM_SCHEMAS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "reddish", "blue"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 40},
    },
    "required": ["name", "colour"],
    "additionalProperties": False,
}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
SET = {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True}


@cache
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@cache
def guides(vocab_size=VOCAB_SIZE, eos=tuple(EOS)):
    return LlGuides(TOKENIZER, vocab_size=vocab_size, eos_token_ids=eos)


@cache
def weights():
    return terseness(
        [tokenizer().decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]
    )


def check(grammar):
    """Compiles a grammar like a gateway's child process and every worker do."""
    guides().prepare(grammar)


def schema(value):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(source):
    return Grammar(GrammarKind.REGEX, source)


def lark(source):
    return Grammar(GrammarKind.LARK, source)


def ids_of(text):
    return tokenizer().encode(text, add_special_tokens=False).ids


def text_of(ids):
    return tokenizer().decode(ids, skip_special_tokens=False)


def allowed(guide):
    return set(allowed_ids(guide.masks(())[0]).tolist())


def accepts(grammar, text):
    """Returns True if exactly the whole of `text` is an answer."""
    guide = guides().open(grammar, ())
    ids = ids_of(text)
    if guide.num_allowed(ids) < len(ids):
        return False
    return bool(allowed(guides().open(grammar, ids)) & set(EOS))


def random_answers(grammar, count, max_tokens=200):
    rng = np.random.default_rng(0)
    return [
        write_answer(guides().open(grammar, ()), weights(), rng, max_tokens=max_tokens, eos=EOS)
        for _ in range(count)
    ]


# ---------------------------------------------------------------- schemas


def test_every_finished_answer_to_a_random_schema_validates():
    rng = np.random.default_rng(0)
    num_finished = 0
    for seed in range(NUM_SCHEMAS):
        wanted = random_schema(seed)
        guide = guides().open(schema(wanted), ())
        answer = write_answer(guide, weights(), rng, max_tokens=300, eos=EOS)
        if answer is not None:
            num_finished += 1
            assert not faults(wanted, text_of(answer)), (seed, text_of(answer))
    assert num_finished > 0.85 * NUM_SCHEMAS


def test_the_schema_checker_finds_faults():
    assert faults(SCHEMA, '{"name": "x", "colour": "green"}')
    assert faults({"type": "string", "format": "date"}, '"2023-02-29"')
    assert faults({"type": "number", "multipleOf": 0.01}, "0.295")


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (SCHEMA, '{"name": "a", "colour": "red"}', '{"colour": "red", "name": "a"}'),
        (SCHEMA, '{\n  "name":"a",\n  "colour":"blue"\n}', '{"name":"a","colour":"blue","x":1}'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        (
            {"type": "string", "format": "date-time"},
            '"2024-05-01T23:59:59Z"',
            '"2024-05-01T12:00:60Z"',
        ),
        ({"type": "string", "format": "time"}, '"23:59:59Z"', '"12:00:60Z"'),
        (
            {"type": "string", "format": "date", "allOf": [{"pattern": "^19"}]},
            '"1999-01-01"',
            '"2000-01-01"',
        ),
        ({"type": "string"}, '"é\\n"', '"\\u0061"'),
        ({"$ref": "#/$defs/größe", "$defs": {"größe": {"const": 1}}}, "1", "2"),
        ({"type": "array", "uniqueItems": False, "maxItems": 1}, '["a"]', '["a", "a"]'),
        (
            {"type": "integer", "minimum": 5, "maximum": 2**63},
            "9007199254740992",
            "9007199254740993",
        ),
        (True, '{"any": [1, null]}', "}"),
        ({"not": {"type": "string"}}, "[1]", '"a"'),
        ({"type": "string", "not": {"enum": ["no", "none"]}}, '"nonsense"', '"none"'),
        ({"not": {"required": ["a"]}}, '{"b": 1}', '{"a": 1}'),
        ({"type": "string", "format": "iri"}, '"a:b"', '" "'),
        ({"type": "string", "format": "odd"}, '"any"', "1"),
        ({"$ref": "#/components/x", "components": {"x": {"type": "string"}}}, '"a"', "1"),
        ({"properties": {"a": {"$id": "b", "type": "null"}}}, '{"a": null}', '{"a": 1}'),
        ({"$schema": DRAFT_4, "type": "boolean", "not": {"enum": [True]}}, "false", "true"),
        ({"type": "number", "not": {"enum": [2, 3]}}, "2.5", "3"),
        (SET, '["y", "x"]', '["x", "x"]'),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab": 1}', '{"b": 1}'),
        ({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "string"}}}, '"a"', "1"),
    ],
)
def test_a_schema_is_followed(wanted, good, bad):
    check(schema(wanted))
    assert accepts(schema(wanted), good)
    assert not accepts(schema(wanted), bad)


def test_a_key_has_one_spelling():
    wanted = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = schema({"type": "object", **wanted})
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, '{"\\u0061": "x"}')


def cycle(length=1):
    """Returns definitions that refer only to each other, in a circle."""
    names = ["n", *(f"n{i}" for i in range(1, length))]
    followers = [*names[1:], "n"]
    links = zip(names, followers, strict=True)
    return {"$defs": {name: {"$ref": f"#/$defs/{follower}"} for name, follower in links}}


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (False, "nothing satisfies"),
        ([], "object or a boolean"),
        ({"not": {"pattern": "a"}}, "not"),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 3}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "minProperties": 3, "required": ["a", "a"]}, "minProperties"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "pattern": r"\bx"}, "boundary"),
        ({"type": "object", "patternProperties": {"[]": {}}}, "character class"),
        ({"oneOf": [{"type": "string"}, {"pattern": "a"}]}, "oneOf"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"$ref": "#/$defs/absent"}, "$ref"),
        ({"$ref": "#/components/y", "components": {"x": {"type": "string"}}}, "$ref"),
        ({"properties": {"a": {"$id": "b", "items": {"$ref": "#/x"}}}}, "$id"),
        ({"const": 2**53 + 1}, "const"),
        ({"enum": [[{"a": -(2**60)}]]}, "enum"),
        ({"minimum": 2**60}, "minimum"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}, "multipleOf"),
        ({"prefixItems": [{}], "additionalItems": False}, "prefixItems"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"type": "strin"}, "strin"),
        ({"enum": []}, "empty"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "finite"),
        (
            {
                **cycle(),
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "required": ["a"],
            },
            "finite",
        ),
        ({**cycle(2), "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}, "finite"),
        ({"anyOf": [{"$ref": "#"}]}, "finite"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "finite"),
        (
            {
                "properties": {"a": {"enum": ["\x1b"]}},
                "required": ["a"],
                "allOf": [{}, {"required": ["b"]}],
            },
            "control",
        ),
    ],
)
def test_unsupported_keywords_are_refused_by_name(wanted, named):
    with pytest.raises(GrammarError) as caught:
        check(schema(wanted))
    assert named in str(caught.value)
    assert "%llguidance" not in str(caught.value)
    with pytest.raises(GrammarError):
        guides().open(schema(wanted), ())


@pytest.mark.parametrize(
    ("pattern", "is_same"),
    [
        (r"[a-z]+[^\]]", True),
        (r"\[a--b\]&&", True),
        ("[a[b]", False),
        ("[]a]", False),
        ("[+--]", False),
    ],
)
def test_expressions_that_differ_between_dialects_are_known(pattern, is_same):
    assert (regex_fault(pattern) is None) is is_same


def nested(depth):
    value = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


def chained(length):
    links = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def test_deep_schemas_are_refused_before_they_cost_a_stack():
    check(schema(nested(40)))
    check(schema(chained(80)))
    for deep in (nested(70), nested(400), chained(150), chained(2_000)):
        with pytest.raises(GrammarError, match="deep"):
            check(schema(deep))


def test_json_nested_near_pythons_limit_is_refused():
    for levels in (250, 985, 20_000):
        text = '{"const": ' + "[" * levels + "]" * levels + "}"
        for grammar in (Grammar(GrammarKind.JSON_SCHEMA, text), lark(f"start: %json {text}")):
            with pytest.raises(GrammarError, match=r"nested|recursion"):
                check(grammar)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]},
        {"type": "integer", "multipleOf": 1_000_003},
        {"type": "number", "multipleOf": 1e-9, "allOf": [{"multipleOf": 3}]},
        {"properties": {"a": {"multipleOf": 10**12}}},
    ],
)
def test_multiples_with_many_remainders_are_refused(wanted):
    with pytest.raises(GrammarError, match="remainders"):
        check(schema(wanted))


def test_common_multiples_are_followed():
    for wanted in ({"multipleOf": 0.000001}, {"allOf": [{"multipleOf": 0.01}, {"multipleOf": 5}]}):
        check(schema({"type": "number", **wanted}))


def test_an_object_has_a_bounded_number_of_properties():
    def optional(count):
        return schema({"type": "object", "properties": {f"p{i}": {} for i in range(count)}})

    grammar = optional(400)
    check(grammar)
    assert accepts(grammar, '{"p0": 1, "p3": 2, "p399": 3, "q": 4}')
    assert accepts(grammar, '{\n  "p0": 1,\n  "p399": 3\n}')
    # the gateway refuses this before a worker would fail on a model that indents
    for count in (500, 1_000):
        with pytest.raises(GrammarError, match="Too many items"):
            check(optional(count))
    with pytest.raises(GrammarError, match="1000 properties"):
        check(optional(3_000))


# ---------------------------------------------------------------- regular expressions and grammars


def test_an_expression_is_matched_as_a_whole():
    for source in (r"(\d{3}-)+x/y", r"^(\d{3}-)+x/y$"):
        check(regex(source))
        assert accepts(regex(source), "123-456-x/y")
        assert not accepts(regex(source), "123-456-x/yz")
        assert not accepts(regex(source), "a123-x/y")


def test_schemas_within_a_grammar_are_followed_as_strictly_as_alone():
    grammar = lark('start: "say %" a | b\na: %json {"format": "date", "type": "string"}\nb: "no"')
    check(grammar)
    assert accepts(grammar, 'say %"2024-02-29"')
    assert accepts(grammar, "no")
    assert not accepts(grammar, 'say %"2023-02-29"')
    with pytest.raises(GrammarError, match="x-guidance"):
        check(lark('start: %json {"x-guidance": {"lenient": true}}'))


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (regex("[a"), "unclosed"),
        (regex("(a)\\1"), "backreferences"),
        (regex("[a&&b]"), "&&"),
        (lark("start: b"), "unknown name"),
        (lark("hello"), "1("),
        (lark('start: a\na[max_tokens=3]: /x*/ "b"'), "max_tokens"),
        (lark('start: a "b"\na [capture, stop="y"]: /x*/'), "stop"),
        (lark('{"grammars": []}'), "Lark"),
        (lark('start: start "a"'), ""),
        (lark("start: %json {"), "%json"),
        (lark('start: "' + "a" * MAX_SOURCE_LEN + '"'), "characters"),
        (lark("start: " + "(" * 300 + '"a"' + ")" * 300), "nested"),
        (lark("start: a\na{x::y} // ]\n\n [lazy,\n temperature=1] :\n /x*/"), "temperature"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"multipleOf": NaN}'), "NaN"),
        (lark('start: %json {"minimum": -Infinity}'), "Infinity"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(grammar, named):
    with pytest.raises(GrammarError) as caught:
        check(grammar)
    assert named in str(caught.value)


def test_rules_may_lead_deeper_than_a_common_stack():
    chain = "\n".join(f"r{i}: r{i + 1}" for i in range(5_000))
    grammar = lark(f'start: r0\n{chain}\nr5000: "a"')
    check(grammar)
    assert accepts(grammar, "a")


@pytest.mark.parametrize(
    "unit", ["\n", " ", "a[\n", "[a", "a{\n", '"\\"', "/\\/", "//", " %json 1"]
)
def test_reading_a_grammar_takes_time_in_proportion_to_its_length(unit):
    """Reading 32 kB of newlines once took seconds, and 128 kB blocked the gateway."""
    longest = lark('start: "a"\n' + unit * ((MAX_SOURCE_LEN - 20) // len(unit)))
    begin_s = time.process_time()
    with contextlib.suppress(GrammarError):
        to_lark(longest)
    assert time.process_time() - begin_s < 1.0


def test_words_in_text_and_in_rules_are_no_options():
    for source in (
        'start: "[stop]:" a?\na: "x"',
        "start: /[stop]/ b\nb: /x/",
        'start: [stop] "a"\nstop: "b"',
    ):
        check(lark(source))


# ---------------------------------------------------------------- token masks


def test_a_mask_holds_the_ids_with_which_the_answer_can_go_on_and_no_others():
    rng = np.random.default_rng(1)
    for answer in random_answers(schema(SCHEMA), 3):
        guide = guides().open(schema(SCHEMA), ())
        for token_id in answer:
            mask = allowed(guide)
            for other in [*rng.integers(VOCAB_SIZE, size=20).tolist(), *list(mask)[:5]]:
                assert guide.num_allowed([other]) == (other in mask)
            guide.consume(token_id)


def test_masks_do_not_depend_on_earlier_questions():
    for answer in random_answers(schema(SCHEMA), 4):
        ended = [*answer, 1]
        stepwise = guides().open(schema(SCHEMA), ())
        for i, token_id in enumerate(ended):
            replayed = guides().open(schema(SCHEMA), ended[:i])
            ahead = ended[i : i + 5]
            assert replayed.num_allowed(ahead) == len(ahead)
            masks = replayed.masks(ahead)
            assert np.array_equal(masks[0], stepwise.masks(())[0])
            for j in range(len(ahead) + 1):
                later = guides().open(schema(SCHEMA), ended[: i + j])
                assert np.array_equal(masks[j], later.masks(())[0])
            stepwise.consume(token_id)


def test_a_proposal_is_allowed_up_to_its_first_forbidden_token():
    guide = guides().open(schema({"type": "integer", "maximum": 99, "minimum": 10}), ())
    digits = [ids_of(str(digit))[0] for digit in (4, 2, 7)]
    assert guide.num_allowed(digits) == 2
    assert guide.num_allowed([digits[0], VOCAB_SIZE + 5]) == 1
    assert guide.num_allowed([VOCAB_SIZE * 2]) == 0
    assert guide.num_allowed([]) == 0
    assert guide.num_allowed([*digits[:2], 1, 0, digits[0]]) == 4
    assert guide.masks([*digits[:2], 1, 0]).shape == (5, VOCAB_SIZE // 32)
    assert guide.fault is None


def test_a_complete_answer_allows_only_end_tokens():
    answer = ids_of("yes")
    guide = guides().open(lark('start: "yes"'), answer)
    assert allowed(guide) == set(EOS)
    for token_id in (1, 0, 0):
        guide.consume(token_id)
        assert allowed(guide) == set(EOS)
    assert guides().open(lark('start: "yes"'), [*answer, 1, 0]).fault is None
    with pytest.raises(GrammarError):
        guides().open(lark('start: "yes"'), [*answer, 1, *answer])


def test_an_answer_that_strays_is_refused():
    with pytest.raises(GrammarError):
        guides().open(schema(SCHEMA), ids_of("hello"))


def test_special_tokens_are_not_text():
    guide = guides().open(regex("(?s:.*)"), ())
    text = allowed(guide)
    special = set(tokenizer().get_added_tokens_decoder())
    assert special & text == set(EOS)
    assert len(text) > VOCAB_SIZE // 2


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 70, VOCAB_SIZE + 32, VOCAB_SIZE - 100])
def test_masks_are_as_wide_as_the_logits_and_padding_is_never_allowed(vocab_size):
    anything = lark("start: <[*]>*")
    guide = guides(vocab_size).open(anything, ())
    for ahead in ([], ids_of("a b")):
        masks = guide.masks(ahead)
        assert masks.shape == (len(ahead) + 1, -(-vocab_size // 32))
        for mask in masks:
            ids = allowed_ids(mask)
            assert len(ids) > 1_000
            assert max(ids) < min(vocab_size, VOCAB_SIZE)


# ---------------------------------------------------------------- limits and threads


def test_a_grammar_that_becomes_too_costly_is_a_fault_and_allows_nothing():
    guide = guides().open(regex("(a{1,1000}){1,1000}"), ())
    ids = ids_of("a")
    for _ in range(200):
        if not guide.masks(()).any():
            break
        guide.consume(ids[0])
    assert guide.fault is not None
    assert "too many" in guide.fault
    assert guide.num_allowed(ids) == 0
    assert not guide.masks(ids).any()
    guide.consume(ids[0])
    assert guides().open(regex("(a{1,1000}){1,1000}"), ids).fault is None


def test_a_grammar_that_takes_too_long_is_a_fault(monkeypatch):
    guide = guides().open(schema(SCHEMA), ())
    monkeypatch.setattr("engine.grammar.guides.MAX_TOKEN_S", 0.0)
    assert not guide.masks(()).any()
    assert guide.fault == "following the grammar takes too long"


def test_a_forbidden_token_is_a_fault():
    guide = guides().open(schema(SCHEMA), ())
    guide.consume(ids_of("hello")[0])
    assert guide.fault is not None
    assert not guide.masks(()).any()


def test_threads_share_one_compiled_grammar():
    makes = LlGuides(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    expected = allowed(guides().open(schema(SCHEMA), ()))
    seen = []

    def work():
        makes.prepare(schema(SCHEMA))
        guide = makes.open(schema(SCHEMA), ())
        seen.append(allowed(guide) == expected)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def test_kept_grammars_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("engine.grammar.guides.MAX_CACHED_BYTES", 4 * STATES_BYTES)
    makes = LlGuides(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    first = makes.open(schema({"const": 0}), ())
    for i in range(10):
        makes.prepare(schema({"const": i}))
        assert STATES_BYTES <= makes.cached_bytes <= 4 * STATES_BYTES
    assert first.num_allowed(ids_of("0")) == 1


def test_memory_that_compiling_freed_is_returned_now_and_then(monkeypatch):
    trims = []
    monkeypatch.setattr("engine.grammar.guides.return_freed_memory", lambda: trims.append(1))
    makes = LlGuides(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    for i in range(2 * COMPILED_BETWEEN_TRIMS):
        makes.prepare(schema({"const": i}))
        makes.prepare(schema({"const": i}))
    assert len(trims) == 2


def test_compiled_grammars_are_kept_for_each_salt_separately():
    makes = guides(VOCAB_SIZE)
    before = makes.cached_bytes
    for salt, num_kept in ((b"a", 1), (b"b", 2), (b"a", 2)):
        makes.open(schema({"const": "kept by salt"}), (), salt)
        assert makes.cached_bytes - before >= num_kept * STATES_BYTES
        assert makes.cached_bytes - before < (num_kept + 1) * STATES_BYTES


def test_a_tokenizer_that_cannot_guide_refuses_every_grammar(tmp_path):
    for text in ("{}", json.dumps({**json.loads(TOKENIZER.read_text()), "decoder": None})):
        (tmp_path / "tokenizer.json").write_text(text)
        makes = LlGuides(tmp_path / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        with pytest.raises(GrammarError):
            makes.open(schema(True), ())
    with pytest.raises(GrammarError, match="ends"):
        guides(VOCAB_SIZE, eos=()).open(schema(True), ())
    with pytest.raises(GrammarError):
        LlGuides(tmp_path / "absent", vocab_size=8, eos_token_ids=EOS).prepare(schema(True))
