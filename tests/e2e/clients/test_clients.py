"""Public clients work: litellm, langchain-openai, instructor, and openai for Node.

These clients need other package versions than Baton's tests, so `make` installs them into
`.venv-clients`. Each program in `programs` makes the typical calls of one client's users.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = Path(__file__).parents[3] / ".venv-clients"
PYTHON = CLIENTS / "bin" / "python"
NODE = shutil.which("node")
NODE_MODULES = CLIENTS / "node_modules"


def run(command, url, **environment):
    done = subprocess.run(
        [*command, f"{url}/v1"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.skipif(not PYTHON.exists(), reason="`make .venv-clients/.installed` makes clients")
@pytest.mark.parametrize("name", ["litellm", "langchain", "instructor"])
def test_a_client_in_python(served, name):
    quiet = {"LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run([PYTHON, "-W", "ignore", PROGRAMS / f"{name}_calls.py"], served.url, **quiet)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.skipif(not (NODE_MODULES / "openai").exists(), reason="npm's openai is not installed")
def test_the_client_for_node(served, tmp_path):
    program = tmp_path / "openai_calls.mjs"
    shutil.copy(PROGRAMS / program.name, program)
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    run([NODE, program], served.url)
