"""Bounds the files and functions that a request enters. The bounds may only be lowered."""

import pytest

from tests.kits.tree.trail import entered, of_one_chat, report

pytestmark = [pytest.mark.torch, pytest.mark.long]

MAX_FILES, MAX_FUNCTIONS = 88, 425


def test_one_streamed_chat_enters_no_more_files_and_functions_than_it_did():
    trails = of_one_chat()
    assert len(trails) == 3  # one gateway, one prefill worker and one decode worker
    files, functions = entered(trails)
    assert len(files) <= MAX_FILES, report(trails)
    assert len(functions) <= MAX_FUNCTIONS, report(trails)
