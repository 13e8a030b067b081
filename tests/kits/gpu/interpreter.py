"""Runs tests of Triton kernels in a process that starts with triton's interpreter."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model.attention import cuda as triton_attention

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 110.0

needs_triton = pytest.mark.skipif(not triton_attention.available(), reason="triton not installed")


def check_under_interpreter(tests: str) -> None:
    """Fails unless the tests in this file of this folder ran and all passed."""
    path = str(Path(__file__).with_name(tests))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path],
        cwd=REPOSITORY,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout)
    assert "skipped" not in done.stdout
