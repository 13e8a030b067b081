"""EBNF grammars allow what llama.cpp's and xgrammar's notation means; hostile grammars
terminate."""

from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import engine.model
from engine.errors import GrammarError
from engine.grammar.ebnf import MAX_GROUPS, is_ebnf, lark_of
from engine.grammar.guides import MAX_MESSAGE_LEN, LlGuides
from engine.messages import Grammar, GrammarKind

TOKENIZER = Path(engine.model.__path__[0]) / "bundled" / "target" / "tokenizer.json"
EOS = 0
SQL = """# as in vLLM's tests
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "

condition ::= column "= " number
number ::= "1 " | "2 "
"""
SUMS = """root ::= sum
sum ::= term
  (("+" | "-") term)*
  | "!"  # alone
term ::= num | "(" sum ")"
num ::= [0-9]{1,3} ws
ws ::= [ \\t]*
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@cache
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@cache
def guides():
    return LlGuides(TOKENIZER, vocab_size=4096, eos_token_ids=[EOS])


def accepts(source, text):
    guide = guides().open(Grammar(GrammarKind.LARK, source), ())
    for token_id in tokenizer().encode(text, add_special_tokens=False).ids:
        if not guide.num_allowed([token_id]):
            return False
        guide.consume(token_id)
    return bool(guide.num_allowed([EOS]))


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (SQL, ["SELECT col_1  from table_1  where col_2 = 2 "], ["SELECT col_1  from table_3 "]),
        (SUMS, ["1+2", "(12-(3 ))", "!"], ["1234", "(1", "1++2", "1!"]),
        (JSON, ['{"a": [1, 2.5e3, "x\\n é"], "b": {}}', "{}"], ['{"a": tru}', "[]"]),
        ('root ::= [a-z]* "abc"', ["abxabc", "abc"], ["abxab"]),
        ('root ::= "a" | ', ["a", ""], ["b"]),
        ('root ::= "x" ( | "y") "z"', ["xz", "xyz"], ["xyyz"]),
        ('root ::= root root | "a"', ["a", "aaaa"], ["ab"]),
        (r'root ::= "\x41\u00e9\U0001F600\t\"%json"', ['Aé😀\t"%json'], ["A"]),
        (r"root ::= [^\]\-/] [-a] [b-]", ["xa-", "\n-b"], ["]ab", "/ab", "xab-"]),
        ('a-b ::= "x"\na_b ::= "y"\nA_B ::= "z"\nroot ::= a-b a_b A_B', ["xyz"], ["xxx"]),
        ('root ::= "a"{2} "b"{1,2} "c"{ 3 , } .', ["aabccc\n"], ["abccc.", "aabbbccc.", "aabcc."]),
        ('root ::= "a"\r\n  | "b" # c\r\n', ["a", "b"], ["c"]),
    ],
)
def test_answers_follow_the_grammar(source, good, bad):
    assert is_ebnf(source)
    assert [text for text in good if not accepts(source, text)] == []
    assert [text for text in bad if accepts(source, text)] == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('root ::= "a', "line 1: '\"a' is not EBNF"),
        ('\nroot ::= "b" c', "line 2: the rule 'c' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined twice"),
        ('"x"\nroot ::= "b"', "line 1: a rule must begin with 'name ::='"),
        ('root ::= "a" "b" ::= "c"', "line 1: '::=' must follow the name of a rule"),
        ('x ::= "a"', "the grammar has no rule 'root'"),
        ('root ::= "a"\n  *+', "line 2: '+' follows nothing to repeat"),
        ("root ::= ()*)", "line 1: ')' closes no group"),
        ("root ::= (\n\n", "line 1: a group in the rule 'root' is not closed"),
        ("root ::= # nothing", "line 1: the rule 'root' is empty"),
        ("root ::= []", "line 1: a character class is empty"),
        ("root ::= [z-a]", "line 1: the range z-a is empty"),
        (r"root ::= [\q]", r"line 1: the escape \q is unknown"),
        (r'root ::= "\uD800"', r"line 1: \uD800 is no character"),
        (r'root ::= "\U00110000"', r"line 1: \U00110000 is no character"),
        ('root ::= "a" (="b")', "line 1: lookahead is not supported"),
        ('root ::= "a"{3,2}', "line 1: '{3,2}' ends before it begins"),
        ('root ::= "a"{99999}', "line 1: '{99999}' repeats more than 10000 times"),
        ("root ::= " + "(" * 99 + '"a"' + ")" * 99, f"line 1: more than {MAX_GROUPS} groups"),
    ],
)
def test_an_error_names_the_clients_line(source, reason):
    with pytest.raises(GrammarError) as caught:
        lark_of(source)
    assert str(caught.value).startswith(reason)


def test_an_error_that_quotes_the_client_is_short():
    with pytest.raises(GrammarError) as caught:
        guides().prepare(Grammar(GrammarKind.LARK, "root ::= " + "a" * 100_000))
    assert len(str(caught.value)) <= MAX_MESSAGE_LEN + 1


def test_lines_of_the_compiler_are_the_clients():
    rules = lark_of(SUMS).splitlines()
    assert rules[1].startswith("rule_1:")  # made from line 2
    assert rules[4].startswith("rule_2:")  # made from line 5


@pytest.mark.parametrize("source", ['start: "a"', 'start: "\\nroot ::= x"', "// root ::= x"])
def test_lark_is_not_taken_for_ebnf(source):
    assert not is_ebnf(source)


@pytest.mark.parametrize(
    "source",
    [
        "root ::= root",
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0',
    ],
)
def test_rules_that_never_end_or_double_are_refused(source):
    with pytest.raises(GrammarError):
        guides().prepare(Grammar(GrammarKind.LARK, source))


@pytest.mark.parametrize(
    "source",
    [
        'root ::= ((("a"{1,9999}){1,9999}){1,9999})',
        'root ::= ("a" root "b"){0,9999}',
        "root ::= " + "(" * MAX_GROUPS + '"a"' + ")" * MAX_GROUPS,
    ],
)
def test_huge_repetitions_and_deep_groups_are_bounded(source):
    guides().prepare(Grammar(GrammarKind.LARK, source))
