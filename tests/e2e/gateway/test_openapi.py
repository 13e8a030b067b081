"""Schemathesis finds no answer of the gateway that /openapi.json does not describe.

Schemathesis sends requests that the description allows and requests that it forbids, with wrong
methods, types and headers. A real listener serves the gateway, which has a fake router.
`positive_data_acceptance` is left out: the gateway refuses some fields in combination, or for this
model, although the schema allows each field alone.
"""

import itertools
import subprocess
import sys
from importlib.util import find_spec

import pytest

from engine.messages import Logprobs
from router.machine.requests import Update
from tests.kits.router.gateway import EOS, STOP, TIMELINE, FakeRouter, make_app_of, versions_of
from tests.kits.router.served_app import served

pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs schemathesis")


CONFIG = """
[generation]
allow-extra-parameters = false  # unknown headers, parameters and fields pass
"""
SCORES = Logprobs(-0.5, 1, (104, 105), (-0.5, -1.5))


class ScoringRouter(FakeRouter):
    """Answers `hi`, with log-probabilities if the request asks for them. The router has a store."""

    def __init__(self):
        super().__init__()
        self.store_block = 1

    def _script_of(self, number):
        request = self.requests[number]
        scores = () if request.sampling.logprobs is None else (SCORES,)
        of_prompt = ()
        if request.prompt_logprobs is not None:
            of_prompt = (SCORES,) * (len(request.token_ids) - 1)
        return [
            Update((104,), logprobs=scores, prompt_logprobs=of_prompt),
            Update((105,), logprobs=scores),
            Update((EOS,), logprobs=scores, outcome=STOP, timeline=TIMELINE),
        ]


class RecedingClock:
    """A clock that goes back one hour at each reading, so that no `x-request-timeout` expires."""

    def __init__(self):
        self._hours = itertools.count()

    def now_s(self):
        return -3600.0 * next(self._hours)


def versions():
    """Returns a table whose only version serves every model name: random names would all get
    404."""
    table = versions_of(ScoringRouter(), context_len=4096)
    choose = table.choose
    table.choose = lambda *, key, model=None, version=None: choose(key=key)
    return table


def check(tmp_path, *options, timeout_s):
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    with served(make_app_of(versions(), RecedingClock())) as url:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
                *options,
                *("--exclude-checks", "positive_data_acceptance"),
                "--generation-deterministic",
                *("--continue-on-failure", "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    assert found.returncode == 0, found.stdout[-20_000:] + found.stderr[-2000:]


def test_no_answer_differs_from_the_description(tmp_path):
    """The longer test covers completions, and values at all limits."""
    options = ("--phases", "examples", "--exclude-path", "/v1/completions")
    check(tmp_path, *options, timeout_s=100)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_answer_to_random_requests_differs_from_the_description(tmp_path):
    options = ("--phases", "examples,coverage,fuzzing", "--max-examples", "200")
    check(tmp_path, *options, timeout_s=800)
