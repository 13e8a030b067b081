"""The tree stays easy to work in: small folders, unique names, short documents."""

import re
import statistics

import pytest

from tests.kits.tree import house

FILES = house.texts()
MOST_FILES = 15  # files in a folder
README_LINES = 150
LONGEST_SENTENCE = 30  # words
MEDIAN_SENTENCE = 17  # words
MOST_TERMS = 60  # in the glossary
DOCUMENTS = sorted(
    path for path in FILES if path.endswith(".md") and path.startswith(("docs/", "README"))
)


def test_folders_hold_few_files():
    crowded = {
        folder: num
        for folder, num in house.files_per_folder(FILES).items()
        if num > MOST_FILES and folder != "."
    }
    assert not crowded


def test_public_class_names_are_unique():
    homes = house.class_homes(house.classes_of_the_tree())
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_readme_is_a_front_page():
    assert FILES["README.md"].count("\n") <= README_LINES


@pytest.mark.parametrize("path", DOCUMENTS)
def test_sentences_are_short(path):
    long = [one for one in house.sentences(FILES[path]) if house.num_words(one) > LONGEST_SENTENCE]
    assert not long
    assert statistics.median(house.sentence_lengths(FILES[path])) <= MEDIAN_SENTENCE


def test_the_glossary_has_few_terms_and_all_are_in_the_code():
    terms = house.rows_of(FILES["docs/glossary.md"], "Terms")
    assert 40 < len(terms) <= MOST_TERMS
    code = "".join(
        text for path, text in FILES.items() if path.endswith(".py") and path[:5] != "tests"
    )
    words = set(re.findall(r"\w+", code))
    assert [term for term, _, name in terms if name.strip("`") not in words] == []


def test_no_public_name_has_a_replaced_word():
    words = [
        word.replace(" ", "_")
        for row in house.rows_of(FILES["docs/glossary.md"], "Replaced words")
        for word in row[0].split(", ")
        if not word.endswith(")")  # a qualified entry replaces only one sense of the word
    ]
    assert len(words) > 5
    assert house.names_with(words, FILES) == []
    assert house.names_with(["drag"], {"router/a.py": "class BigDrag: ..."}) == [
        "router/a.py: BigDrag"
    ]


def test_nouns_are_said_again():
    """A comment after code is no fragment, and a variable number has a name."""
    riddle = re.compile(r"\S +# of\b|\b(?:so many|so much|what of|whoever)\b", re.IGNORECASE)
    prose = {
        path: text
        for path, text in FILES.items()
        if path.startswith((*house.PRODUCT, "docs/", "README")) and not path.endswith(".json")
    }
    found = [
        f"{path}: {line.strip()}"
        for path, text in prose.items()
        for line in text.splitlines()
        if riddle.search(line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("One two three. Four five six seven!", [3, 4]),
        ("a `b c` d; still the same: yes\nit is", [9]),
        ("- one two three\n- four five six\n", [3, 3]),
        ("```\nnot counted at all\n```\nbut this is", [3]),
        ("[a link](to/somewhere) has five words", [5]),
    ],
)
def test_sentences_are_counted(text, lengths):
    assert house.sentence_lengths(text) == lengths
