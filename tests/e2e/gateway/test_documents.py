"""Commands in the documents work against a deployment: curl, Python, the operator's commands."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from deploy.base.run_dir import announced, run_directory
from deploy.commands.main import app
from tests.kits.services.served import Served, matching, metrics, poll_until, serve
from tests.kits.tree import documents
from tests.kits.tree.documents import SHELLS, Block

pytestmark = pytest.mark.torch

WRITTEN = re.compile(r"http://(127\.0\.0\.1|localhost):8000")
WRITTEN_GRPC = re.compile(r"(127\.0\.0\.1|localhost):8001")
# the small bundled model stands in for the default model
DEFAULT, SERVED = "smollm2-135m-instruct", "baton-bundled"
LOOKS_ONLY = {"pools", "planner", "requests", "version", "versions", "workers"}
BLOCKS = [block for page in documents.documents() for block in documents.blocks(page)]
CURLS = [  # commands without an API key; those with a key need another deployment
    block
    for block in BLOCKS
    if block.language in SHELLS and "curl " in block.text and WRITTEN.search(block.text)
    if "uthorization" not in block.text
]
PROGRAMS = [  # client programs in Python
    block
    for block in BLOCKS
    if block.language == "python"
    if WRITTEN.search(block.text) or WRITTEN_GRPC.search(block.text)
]


def said(command: list[str], typed: str = "", **environment: str) -> str:
    """Runs a command with this input and returns its output. The command must succeed."""
    done = subprocess.run(
        command,
        env={**os.environ, "COLUMNS": "200", **environment},
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pointed_at(served: Served, text: str) -> str:
    """Returns an example with the address of this deployment."""
    return WRITTEN_GRPC.sub(served.grpc, WRITTEN.sub(served.url, text)).replace(DEFAULT, SERVED)


def titles(blocks: list[Block]) -> list[str]:
    return [f"{block.document}:{number}" for number, block in enumerate(blocks)]


@pytest.fixture(scope="module")
def with_store(lent) -> Iterator[Served]:
    """Starts a deployment with a store, and waits until the store has joined."""
    with serve("--launcher", "process", command=lent, BATON_STORE__MEMORY_MIB="16") as running:
        slots = r"baton_store_slots\{"
        poll_until(lambda: bool(matching(slots, metrics(running.url))), "the store joins")
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("block", CURLS, ids=titles(CURLS))
def test_curl_examples_get_answers(request, block):
    needs_store = "/v1/pins" in block.text
    served = request.getfixturevalue("with_store" if needs_store else "served")
    script = pointed_at(served, block.text).replace("curl ", "curl --fail --silent ")
    assert said(["bash", "-euo", "pipefail", "-c", script])


@pytest.mark.parametrize("block", PROGRAMS, ids=titles(PROGRAMS))
def test_python_examples_run(served, block):
    said([sys.executable, "-c", pointed_at(served, block.text)])


def test_documents_have_examples_of_clients():
    assert len(CURLS) > 1
    assert {bool(WRITTEN_GRPC.search(block.text)) for block in PROGRAMS} == {True, False}


def test_baton_chat_answers_what_is_typed(served):
    options = ["--url", served.url, "--max-tokens", "8", "--temperature", "0"]
    chat = [sys.executable, "-m", "deploy.commands.main", "chat", *options]
    lines = said(chat, "def add(a, b):\n").splitlines()
    assert lines[0].endswith(f"at {served.url}; /help lists commands, Ctrl-D ends")
    assert "".join(lines[1:]).replace("you>", "").strip()


def test_operators_commands_that_only_look_work(served):
    found = (one for page in documents.documents() for one in documents.commands(page))
    lines = {one.words[1:] for one in found if one.words[0].endswith("baton")}
    looks = [words for words in lines if len(words) == 1 and words[0] in LOOKS_ONLY]
    assert looks
    [access] = [each for each in announced(run_directory(os.environ)) if each.url == served.url]
    to_admin = {"BATON_ADMIN_URL": access.admin_url, "BATON_ADMIN_KEY": access.key}
    for words in looks:
        done = CliRunner().invoke(app, words, env=to_admin)
        assert done.exit_code == 0, done.output
        assert done.output
