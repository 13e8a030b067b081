"""The plan of `bench starts`."""

import pytest

from bench.starts.plan import StartsPlan, check, config_of
from engine.errors import ConfigError


def test_a_plan_names_known_launchers():
    assert check(StartsPlan()) == StartsPlan()
    with pytest.raises(ConfigError, match="no launcher is called 'slurm'"):
        check(StartsPlan(("ray", "slurm")))


def test_a_report_says_which_launchers_were_started():
    assert config_of(StartsPlan(("ray",), 2)) == {
        "launchers": "ray",
        "num_repeats": 2,
        "first": True,
    }
