"""Ray's processes are looked for by their session, without asking Ray."""

from deploy.ray import health
from deploy.ray.gcs_keeper import GCS, Command


def test_only_processes_of_the_own_session_count(monkeypatch):
    processes = {GCS: [Command(1, (GCS, "--session-name=session_1"), {})]}
    monkeypatch.setattr(health, "running", lambda program: processes.get(program, []))
    assert health.parts_of_ray("session_1") == {"gcs": True, "raylet": False}
    assert health.parts_of_ray("session_2") == {"gcs": False, "raylet": False}
    assert health.parts_of_ray("") == {"gcs": False, "raylet": False}
