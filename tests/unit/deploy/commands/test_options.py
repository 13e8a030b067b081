"""Option values that several subcommands share."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from deploy.admin.client import AdminError
from deploy.commands import options
from deploy.commands.main import app
from deploy.commands.options import COMPLETES_WITHIN_S, parse_seconds
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60.0), ("60s", 60.0), ("1.5m", 90.0), ("1h", 3600.0), ("0", 0.0)]
)
def test_lengths_of_time_may_have_a_unit(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 s", "1d", "1e3", "inf", "nan", "1m30s", "٣"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ConfigError, match="no length of time"):
        parse_seconds(text)


class FakePools:
    """A client of a deployment that may or may not answer a question about its pools."""

    def __init__(self, failure: Exception | None) -> None:
        self.failure = failure

    def __enter__(self) -> "FakePools":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def pools(self, *, timeout_s: float) -> SimpleNamespace:
        assert timeout_s == COMPLETES_WITHIN_S
        if self.failure is not None:
            raise self.failure
        workers = [("worker-0", "prefill"), ("worker-10", "decode"), ("worker-2", None)]
        return SimpleNamespace(
            workers=[
                SimpleNamespace(worker_id=name, role=role, target="mixed", state="serving")
                for name, role in workers
            ],
            gateways=[SimpleNamespace(name="gateway-0", state="serving")],
            versions=[SimpleNamespace(name="v1", model_name="small")],
        )


def completed(line: str, shell: str) -> str:
    """Returns the words that a shell receives for the last word of a line."""
    environment = {
        "_BATON_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        "_TYPER_COMPLETE_ARGS": line,
    }
    return CliRunner().invoke(app, [], prog_name="baton", env=environment).output


def test_shells_complete_names_of_workers_and_tell_their_roles(monkeypatch):
    asked = []
    monkeypatch.setattr(options, "connect", lambda *each: asked.append(each) or FakePools(None))
    assert completed("baton flip --deployment a worker-", "bash").split() == [
        *("worker-0", "worker-10", "worker-2")
    ]
    assert asked == [(None, None, "a")]
    assert completed("baton drain worker-1", "bash").split() == ["worker-10"]
    assert "prefill, serving" in completed("baton stop-worker ", "zsh")
    assert "mixed, serving" in completed("baton stop-worker ", "zsh")
    assert completed("baton versions finish ", "bash").split() == ["v1"]
    assert completed("baton logs ", "bash").split() == [
        *("worker-0", "worker-10", "worker-2", "gateway-0", "controller")
    ]


@pytest.mark.parametrize("failure", [AdminError("no"), ConfigError("no deployment runs")])
def test_shells_complete_nothing_without_an_answer(monkeypatch, failure):
    monkeypatch.setattr(options, "connect", lambda *_: FakePools(failure))
    assert completed("baton flip ", "bash").strip() == ""
