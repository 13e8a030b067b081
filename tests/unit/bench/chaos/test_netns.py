"""Reasons why a machine cannot cut a network. `tests/e2e/sessions/test_netns.py` tests the cuts."""

import os
import shutil

import pytest
from typer.testing import CliRunner

from bench.chaos.netns import MAX_PLACES, Unavailable, hub, place
from bench.cli import app


def test_hub_without_root_or_ip_names_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="need root"), hub():
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(Unavailable, match="iproute2"), hub():
        pass


def test_bench_names_in_one_line_why_it_cannot_partition(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["chaos", "--faults", "kill,partition"])
    assert done.exit_code == 1
    assert done.output == "error: a partition: network namespaces need root\n"


@pytest.mark.parametrize("number", [0, MAX_PLACES + 1])
def test_number_of_places_is_bounded(number):
    with pytest.raises(ValueError, match=f"{number} is not a place's number"):
        place("p0", number)
