"""Finds the result names of a benchmark that its document does not explain."""

import fnmatch
import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs/users"


def unexplained(names: Iterable[str], document: str) -> list[str]:
    """Returns the names that the document has neither in full nor as a pattern such as `ttft/*`."""
    told = re.findall("`([a-z0-9_/*]+)`", (DOCS / document).read_text())
    return [name for name in names if not any(fnmatch.fnmatchcase(name, one) for one in told)]
