"""The compatibility table equals the tests, and no test of another server is named twice."""

from collections import Counter

from tests.kits.tree import compat
from tests.kits.tree.documents import ROOT


def test_the_document_shows_the_table():
    text = (ROOT / "docs/users/compatibility.md").read_text()
    _, _, rest = text.partition("<!-- compat -->\n")
    assert rest.partition("<!-- end -->")[0] == "\n" + compat.table(), (
        "write the output of `python -m tests.kits.tree.compat` there"
    )


def test_what_is_left_out_has_no_twin():
    twins = {(twin.server, twin.file, twin.name) for twin in compat.twins()}
    left = Counter((each.server, each.file, n) for each in compat.LEFT_OUT for n in each.names)
    assert not twins & left.keys()
    assert max(left.values()) == 1
    assert twins
