"""The keeper finds the GCS and its session, and restarts the GCS only while Ray is running."""

import os
import subprocess
import threading

import pytest

from deploy.ray import gcs_keeper
from deploy.ray.gcs_keeper import GCS, Command, find
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


def test_gcs_with_rocksdb_is_found(monkeypatch):
    gcs = Command(7, ARGUMENTS[:2], {"RAY_gcs_storage": "rocksdb"})
    monkeypatch.setattr(gcs_keeper, "running", lambda _: [gcs])
    assert find() == gcs


def test_restarted_gcs_gets_the_port_that_the_first_one_chose():
    gcs = Command(7, ("gcs_server", "--gcs_server_port=0", "--x=1"), {})
    assert gcs.at_port(41).arguments == ("gcs_server", "--gcs_server_port=41", "--x=1")


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)


def test_gcs_that_dies_is_started_again_until_the_keeper_is_stopped(monkeypatch):
    raylet = Command(8, ("/x/raylet/raylet", "--session-name=session_7"), {})
    monkeypatch.setattr(gcs_keeper, "running", lambda _: [raylet])
    monkeypatch.setattr(gcs_keeper.Restarts, "failed", lambda *_: 0.0)
    first = sleeper()
    arguments = ("sh", "-c", "exec sleep 60", "--session-name=session_7")
    gcs = Command(first.pid, arguments, dict(os.environ))
    keeper = gcs_keeper.GcsSupervisor(gcs, MonotonicClock(), shares_fate=True)
    thread = threading.Thread(target=keeper.run)
    started = threading.Event()
    monkeypatch.setattr(gcs_keeper.Restarts, "started", lambda *_: started.set())
    thread.start()
    first.kill()
    first.wait()
    assert started.wait(5)
    keeper.stop()
    thread.join(5)
    assert not thread.is_alive()
    keeper.end_gcs()
    assert keeper.num_restarts == 1


def test_gcs_is_not_restarted_after_ray_was_stopped(monkeypatch):
    monkeypatch.setattr(gcs_keeper, "running", lambda _: [])
    monkeypatch.setattr(gcs_keeper.subprocess, "Popen", None)
    monkeypatch.setattr(gcs_keeper.Restarts, "failed", lambda *_: 0.0)
    no_process = 2**22 + 7
    gcs_keeper.GcsSupervisor(Command(no_process, ARGUMENTS, {}), MonotonicClock()).run()


def test_keeper_stops_while_the_gcs_runs():
    gcs = sleeper()
    keeper = gcs_keeper.GcsSupervisor(Command(gcs.pid, ARGUMENTS, {}), MonotonicClock())
    thread = threading.Thread(target=keeper.run)
    thread.start()
    keeper.stop()
    thread.join(5)
    assert not thread.is_alive()
    keeper.end_gcs()
    assert gcs.poll() is None  # the keeper did not start this process
    gcs.kill()
    gcs.wait()


def test_only_processes_of_the_own_session_count(monkeypatch):
    processes = {GCS: [Command(1, (GCS, "--session-name=session_1"), {})]}
    monkeypatch.setattr(gcs_keeper, "running", lambda program: processes.get(program, []))
    assert gcs_keeper.parts_of_ray("session_1") == {"gcs": True, "raylet": False}
    assert gcs_keeper.parts_of_ray("session_2") == {"gcs": False, "raylet": False}
    assert gcs_keeper.parts_of_ray("") == {"gcs": False, "raylet": False}
