"""Measures how easily a reader finds things in the tree: folders, names, sizes and sentences.

`python -m tests.kits.tree.house [REVISION]` prints the figures of the working tree or of a commit.
`tests/unit/test_house.py` asserts bounds on these figures.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("router", "prefill", "decode", "kvtransfer", "deploy", "bench", "engine")
_FENCE = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[^a-z])")
_CLASS = re.compile(r"^\s*class ", re.MULTILINE)
_DEFINED = re.compile(r"^\s*(?:class|(?:async )?def) (\w+)", re.MULTILINE)
_LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


@dataclass(frozen=True)
class ProductClass:
    """A class of the product, the last names of its base classes, and its length in lines."""

    name: str
    path: str
    bases: tuple[str, ...]
    num_lines: int


def texts(revision: str | None = None) -> dict[str, str]:
    """Returns text files by path, from a commit or, without `revision`, from the working tree."""
    if revision is None:
        files = [file for top in (*PRODUCT, "tests", "docs") for file in (ROOT / top).rglob("*")]
        files += ROOT.glob("*.*")
        paths = {str(file.relative_to(ROOT)): file for file in files if file.is_file()}
        return {path: paths[path].read_text("utf-8") for path in sorted(paths) if _is_text(path)}
    listed = _git("ls-tree", "-r", "--name-only", revision).splitlines()
    return {path: _git("show", f"{revision}:{path}") for path in listed if _is_text(path)}


def files_per_folder(paths: Iterable[str]) -> Counter[str]:
    """Returns the number of text files directly in each folder, without `__init__.py`."""
    own = (path for path in paths if not path.endswith("__init__.py"))
    return Counter(str(Path(path).parent) for path in own)


def lines_per_folder(files: Mapping[str, str]) -> Counter[str]:
    """Returns the lines of Python in each top-level folder."""
    lines: Counter[str] = Counter()
    for path, text in files.items():
        if path.endswith(".py"):
            lines[path.partition("/")[0]] += text.count("\n")
    return lines


def sentences(markdown: str) -> Iterator[str]:
    """Returns the sentences of a document and the cells of its tables.

    Fenced code is left out, and inline code counts as one word. The end of a list item or of a
    heading ends a sentence; colons and semicolons do not.
    """
    text = _LINK.sub(r"\1", _CODE.sub("Code", _COMMENT.sub("", _FENCE.sub("", markdown))))
    for paragraph in _paragraphs(text):
        for sentence in _END_OF_SENTENCE.split(paragraph):
            if sentence.strip():
                yield sentence.strip()


def sentence_lengths(markdown: str) -> list[int]:
    """Returns the words of each sentence of at least three words, without tables."""
    prose = "\n".join(line for line in markdown.splitlines() if not line.startswith("|"))
    lengths = (num_words(sentence) for sentence in sentences(prose))
    return [length for length in lengths if length >= 3]


def num_words(text: str) -> int:
    """Counts the words of a text: runs of characters with at least one letter or digit."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def product_trees(files: Mapping[str, str]) -> Iterator[tuple[str, ast.Module]]:
    """Yields the syntax tree of each Python file of the product."""
    for path, text in files.items():
        if path.endswith(".py") and path.partition("/")[0] in PRODUCT:
            yield path, ast.parse(text)


@cache
def classes_of_the_tree() -> tuple[ProductClass, ...]:
    """Returns the classes of the product in the working tree."""
    return tuple(product_classes(texts()))


def product_classes(files: Mapping[str, str]) -> Iterator[ProductClass]:
    """Returns each class of the product. Only files with classes are parsed."""
    with_classes = {path: text for path, text in files.items() if _CLASS.search(text)}
    for path, tree in product_trees(with_classes):
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield ProductClass(node.name, path, bases, num_lines)


def class_homes(classes: Iterable[ProductClass]) -> dict[str, list[str]]:
    """Returns the files that define each public class of the product, by class name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for each in classes:
        if not each.name.startswith("_"):
            homes[each.name].append(each.path)
    return homes


def rows_of(glossary: str, heading: str) -> list[list[str]]:
    """Returns the rows of the table below a heading, without the header."""
    section = glossary.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def names_with(words: Iterable[str], files: Mapping[str, str]) -> list[str]:
    """Returns public names of modules, classes and functions of the product with this word.

    A plural of the word counts too; a longer word that contains it does not.
    """
    pattern = re.compile(rf"(?:^|_)(?:{'|'.join(words)})s?(?:_|$)")
    named = []
    for path, text in files.items():
        if not path.endswith(".py") or path.partition("/")[0] not in PRODUCT:
            continue
        for name in (Path(path).stem, *_DEFINED.findall(text)):
            snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
            if not name.startswith("_") and pattern.search(snake):
                named.append(f"{path}: {name}")
    return named


def function_lengths(files: Mapping[str, str]) -> list[int]:
    """Returns the lines of each function and method of the product, ascending."""
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for _, tree in product_trees(files)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def main() -> None:
    """Prints the figures."""
    files = texts(sys.argv[1] if len(sys.argv) > 1 else None)
    folders = files_per_folder(files).most_common(12)
    print("files a folder:", ", ".join(f"{folder} {num}" for folder, num in folders))
    lines = lines_per_folder(files)
    print("lines of Python:", ", ".join(f"{top} {num}" for top, num in sorted(lines.items())))
    print(f"lines of Python in all: {lines.total()}, product {sum(lines[top] for top in PRODUCT)}")
    readme = files["README.md"]
    print(f"README: {readme.count(chr(10))} lines, {num_words(readme)} words")
    for path in sorted(path for path in files if path.endswith(".md")):
        lengths = sentence_lengths(files[path])
        if lengths:
            long = sum(num_words(sentence) > 30 for sentence in sentences(files[path]))
            middle = f"median {statistics.median(lengths):g} words"
            print(f"  {path}: {len(lengths)} sentences, {middle}, {long} over 30")
    lengths = function_lengths(files)
    p50, p90 = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    print(f"functions: {len(lengths)}, p50 {p50} lines, p90 {p90}")
    classes = [*product_classes(files)]
    for each in sorted(classes, key=lambda each: each.num_lines, reverse=True)[:8]:
        print(f"  class {each.name}: {each.num_lines} lines, {each.path}")
    clashes = {name: homes for name, homes in class_homes(classes).items() if len(homes) > 1}
    print(f"public class names with several homes: {len(clashes)}")
    for name, homes in sorted(clashes.items()):
        print(f"  {name}: {', '.join(homes)}")


def _paragraphs(text: str) -> Iterator[str]:
    """Yields runs of lines that form one paragraph."""
    current: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        is_item = _LIST_ITEM.match(line) is not None
        if not stripped or is_item or stripped.startswith(("|", "#")):
            if current:
                yield " ".join(current)
            current = [_LIST_ITEM.sub("", line).strip()] if is_item else []
        else:
            current.append(stripped)
        if stripped.startswith("|"):
            yield from (cell.strip() for cell in stripped.strip("|").split("|"))
        elif stripped.startswith("#"):
            yield stripped.lstrip("# ")


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields each statement and the nodes that contain statements.

    Expressions are skipped for speed.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from _statements(node)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _is_text(path: str) -> bool:
    return path.endswith((".py", ".md", ".toml", ".yaml", ".cpp", ".h", ".hpp", ".inc"))


if __name__ == "__main__":
    main()
