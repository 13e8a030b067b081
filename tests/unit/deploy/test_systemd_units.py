"""systemd accepts the units in `deploy/systemd`, which match Baton's deadlines and settings."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import deploy
from deploy.base.launcher import STOP_TIMEOUT_S
from engine.config import GatewayConfig, load_config

FOLDER = Path(deploy.__file__).parent / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
MOST_EXPOSED = 2.0  # highest accepted exposure, of 10, by `systemd-analyze security`


def settings(name: str) -> dict[str, list[str]]:
    """Returns the values of each setting of a unit, in order."""
    values = defaultdict(list)
    for line in (FOLDER / name).read_text().splitlines():
        if re.match(r"\w+=", line):
            setting, _, value = line.partition("=")
            values[setting].append(value)
    return values


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name, tmp_path):
    """The units' programs are not installed here, so the test replaces them with /bin/true."""
    for unit in UNITS:
        text = re.sub(r"/opt/baton/bin/\w+", "/bin/true", (FOLDER / unit).read_text())
        (tmp_path / unit).write_text(text)
    done = analyze("verify", "--man=no", str(tmp_path / name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", UNITS)
def test_units_are_exposed_to_little(name):
    done = analyze(
        "security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:g}", FOLDER / name
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", UNITS)
def test_units_run_as_their_own_user(name):
    unit = settings(name)
    assert unit["User"] == unit["Group"] == ["baton"]
    assert "\nu baton " in (FOLDER / "baton.sysusers").read_text()


def test_stop_waits_for_answers_and_signals_one_process_only():
    unit = settings("baton.service")
    assert unit["KillMode"] == ["mixed"]
    # the gateways stop first, then the workers
    least_s = GatewayConfig().drain_timeout_s + 2 * STOP_TIMEOUT_S
    assert int(unit["TimeoutStopSec"][0]) > least_s
    assert unit["Type"] == ["notify"]


def test_settings_are_valid_and_lie_in_folders_of_the_unit():
    unit = settings("baton.service")
    config = load_config(FOLDER / "baton.toml", {}, {})
    files = (config.gateway.keys_file, config.gateway.store, config.logs.access, config.logs.audit)
    assert {str(Path(str(file)).parent) for file in files} == {"/var/lib/baton", "/var/log/baton"}
    assert unit["StateDirectory"] == unit["LogsDirectory"] == ["baton"]
    assert "--config /etc/baton/baton.toml" in unit["ExecStart"][0]


@pytest.mark.parametrize("name", ["baton-head.service", "baton-node.service"])
def test_units_of_a_cluster_start_again_after_any_end_and_leave_nothing(name):
    unit = settings(name)
    assert unit["Restart"] == ["always"]
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert unit["KillMode"] == ["control-group"]
    assert " start " in unit["ExecStart"][0]
    assert "--block" in unit["ExecStart"][0]
    timeout = "RAY_gcs_rpc_server_reconnect_timeout_s=20"
    assert timeout in unit["Environment"]
    assert "RAY_worker_niceness=0" in unit["Environment"]
