"""Whether the processes of Ray on this machine are alive, without asking Ray.

A call to Ray waits for a dead GCS for a minute. So the processes are looked for in /proc, by the
name of the Ray session in their arguments.
"""

from deploy.ray.gcs_keeper import GCS, RAYLET, running


def parts_of_ray(session: str) -> dict[str, bool]:
    """Returns which of Ray's processes run here. A session without a name has none."""
    programs = {"gcs": GCS, "raylet": RAYLET}
    return {
        part: bool(session) and any(each.session == session for each in running(program))
        for part, program in programs.items()
    }
