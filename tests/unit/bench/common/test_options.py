"""Options that several benchmarks take."""

import os
import sys
from pathlib import Path

import pytest

from bench.common.options import (
    PeerProgram,
    check_choices,
    environment_of_peers,
    peers_named,
)
from engine.errors import ConfigError

PYTHON = sys.executable


def test_a_peer_is_named_with_its_python(tmp_path):
    odd = tmp_path / "a=b"
    odd.touch()
    named = peers_named([f"vllm={PYTHON}", f"nixl={odd}"], ("vllm", "nixl"))
    assert named == (PeerProgram("vllm", Path(PYTHON)), PeerProgram("nixl", odd))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["vllm"], "is not NAME=PYTHON with a NAME of vllm, nixl"),
        ([f"sglang={PYTHON}"], "is not NAME=PYTHON"),
        ([f"={PYTHON}"], "is not NAME=PYTHON"),
        ([f"vllm={PYTHON}", f"vllm={PYTHON}"], "names vllm twice"),
        (["vllm=/nowhere/python"], "--peer vllm: there is no /nowhere/python"),
    ],
)
def test_peer_that_cannot_be_run_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        peers_named(options, ("vllm", "nixl"))


def test_peers_do_not_get_the_variables_of_our_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert "PYTHONPATH" not in environment_of_peers()
    assert environment_of_peers()["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("chosen", "said"), [(("a", "c"), "--of must be out of a, b: c"), ((), "none given")]
)
def test_choice_out_of_none_or_others_is_refused(chosen, said):
    check_choices("--of", ("b",), ("a", "b"))
    with pytest.raises(ConfigError, match=said):
        check_choices("--of", chosen, ("a", "b"))
