"""An answer's Markdown becomes allowed elements only; a model's output is never HTML.

Skipped without Node.
"""

import pytest

from tests.kits.services.scripts import NODE, called_scripts

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with called_scripts(tmp_path_factory.mktemp("scripts")) as call:
        yield call


def strong(*children):
    return ["strong", {}, list(children)]


def em(*children):
    return ["em", {}, list(children)]


@pytest.fixture
def tree(node):
    return lambda text: node("play/markdown.js", "treeOf", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo", [["p", {}, ["one\ntwo"]]]),
        ("one\n\ntwo", [["p", {}, ["one"]], ["p", {}, ["two"]]]),
        ("# A #\ntext", [["h3", {}, ["A"]], ["p", {}, ["text"]]]),
        ("###### A", [["h6", {}, ["A"]]]),
        ("#no heading", [["p", {}, ["#no heading"]]]),
        ("---", [["hr", {}, []]]),
        ("> a\n> b", [["blockquote", {}, [["p", {}, ["a\nb"]]]]]),
        ("- a\n- b", [["ul", {}, [["li", {}, ["a"]], ["li", {}, ["b"]]]]]),
        ("3. a\n4. b", [["ol", {"start": "3"}, [["li", {}, ["a"]], ["li", {}, ["b"]]]]]),
        ("- a\n  - b", [["ul", {}, [["li", {}, ["a", ["ul", {}, [["li", {}, ["b"]]]]]]]]]),
        ("**a** *b* _c_", [["p", {}, [strong("a"), " ", em("b"), " ", em("c")]]]),
        ("**a *b***", [["p", {}, [strong("a *b"), "*"]]]),
        ("snake_case_name 2 * 3 * 4", [["p", {}, ["snake_case_name 2 * 3 * 4"]]]),
        ("`a*b*` ``c`d``", [["p", {}, [["code", {}, ["a*b*"]], " ", ["code", {}, ["c`d"]]]]]),
        ("`open", [["p", {}, ["`open"]]]),
        (r"\*a\*", [["p", {}, ["*a*"]]]),
    ],
)
def test_markdown_becomes_elements(tree, text, expected):
    assert tree(text) == expected


@pytest.mark.parametrize("text", ["```python\na = 1\n\n*b*\n```", "```python\na = 1\n\n*b*"])
def test_code_is_kept_as_it_came_also_while_it_comes(tree, text):
    ((tag, attributes, children),) = tree(text)
    assert (tag, attributes["aria-label"]) == ("pre", "Code, python")
    assert children == [["code", {}, ["a = 1\n\n*b*"]]]


def test_links_go_to_other_pages_by_http_only(tree):
    ((_, _, (link,)),) = tree("[a *b*](https://example.org/x?y=1)")
    assert link[:2] == [
        "a",
        {
            "href": "https://example.org/x?y=1",
            "rel": "noopener noreferrer nofollow",
            "target": "_blank",
        },
    ]
    assert link[2] == ["a ", em("b")]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a]( data:text/html,<script>1</script>)",
    "[a](//example.org)",
    "[a](/dashboard)",
    "[a](https://x onclick=alert(1))",
    "[a](vbscript:x)",
    "![a](javascript:1)",
    "```<b>\n</code><script>alert(1)</script>\n```",
    "# <svg onload=1>",
    "> - **<iframe src=javascript:1>**",
]
TAGS = {"p", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li"}
TAGS |= {"pre", "code", "strong", "em", "a"}
NAMES = {"href", "rel", "target", "start", "tabindex", "role", "aria-label"}


def elements(nodes):
    for node in nodes:
        if not isinstance(node, str):
            yield node
            yield from elements(node[2])


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_writes_becomes_no_html_and_no_script(tree, text):
    found = list(elements(tree(text)))
    assert {tag for tag, _, _ in found} <= TAGS - {"a"}
    assert {name for _, attributes, _ in found for name in attributes} <= NAMES


@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "*",
        "_a",
        "`",
        "**a ",
        "[a](",
        "[a](x) ",
        "# ",
        "- ",
        "> ",
        "  - a\n",
        "~~~",
        "\\",
        "1. ",
    ],
)
def test_long_texts_are_read_in_linear_time(tree, unit):
    text = unit * (20_000 // len(unit))
    assert {tag for tag, _, _ in elements(tree(text + "\n" + text + "x)`"))} <= TAGS
