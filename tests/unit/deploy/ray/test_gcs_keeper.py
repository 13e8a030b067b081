"""The keeper finds the GCS and its session, and restarts it only while Ray runs."""

import pytest

from deploy.ray import gcs_keeper
from deploy.ray.gcs_keeper import Command, find
from engine.clock import MonotonicClock
from engine.errors import ConfigError

ARGUMENTS = ("/x/gcs/gcs_server", "--session-name=session_7", "--redis_address=127.0.0.1")


def test_session_name_is_read_from_gcs_and_raylet_arguments():
    assert Command(1, ARGUMENTS, {}).session == "session_7"
    assert Command(1, ("/x/raylet/raylet", "--session-name=session_7"), {}).session == "session_7"
    assert Command(1, ("/x/raylet/raylet",), {}).session == ""


def test_one_gcs_with_redis_is_found(monkeypatch):
    gcs = Command(7, ARGUMENTS, {})
    monkeypatch.setattr(gcs_keeper, "running", lambda _: [gcs])
    assert find() == gcs


@pytest.mark.parametrize(
    ("there", "complaint"),
    [
        ([], "found: none"),
        ([Command(7, ARGUMENTS, {}), Command(8, ARGUMENTS, {})], "found: 7, 8"),
        ([Command(7, ARGUMENTS[:2], {})], "stores nothing in Redis"),
    ],
)
def test_unsuitable_gcs_is_refused(monkeypatch, there, complaint):
    monkeypatch.setattr(gcs_keeper, "running", lambda _: there)
    with pytest.raises(ConfigError, match=complaint):
        find()


def test_a_running_process_shows_its_arguments_and_environment():
    me = gcs_keeper.running("python")
    mine = gcs_keeper.running("python3") + gcs_keeper.running("python3.11") + me
    assert any("pytest" in " ".join(each.arguments) for each in mine)
    assert any("PATH" in each.environment for each in mine)


def test_gcs_is_not_restarted_after_ray_was_stopped(monkeypatch):
    there = [Command(8, ("/x/raylet/raylet", "--session-name=session_7"), {})]
    waits: list[float] = []

    class Pause:
        def wait(self, seconds: float) -> None:
            waits.append(seconds)
            there.clear()  # the raylet ends a moment later

    monkeypatch.setattr(gcs_keeper, "running", lambda _: there)
    monkeypatch.setattr(gcs_keeper.threading, "Event", Pause)
    monkeypatch.setattr(gcs_keeper.subprocess, "Popen", None)
    no_process = 2**22 + 7
    gcs_keeper.Keeper(Command(no_process, ARGUMENTS, {}), MonotonicClock()).run()
    assert waits == [1.0]
