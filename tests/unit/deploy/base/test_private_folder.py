"""Folders of dead deployments are removed, and their leftover processes are killed."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.base import private_folder
from deploy.base.private_folder import LOCK, PrivateFolder, sweep

HOLDS = "import os, sys; os.open(sys.argv[1], os.O_DIRECTORY); print(flush=True); sys.stdin.read()"


@pytest.fixture
def parent(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def dead(parent: Path) -> Path:
    """Makes a folder that a dead deployment has left behind."""
    folder = parent / "baton-dead"
    folder.mkdir()
    (folder / LOCK).touch()
    return folder


def test_only_folders_of_dead_deployments_are_removed(parent):
    running = PrivateFolder()
    running.open()
    left, other = dead(parent), parent / "baton-of-another-program"
    other.mkdir()
    assert sweep() == [left]
    assert {each.name for each in parent.iterdir()} == {running.path.name, other.name}
    assert running.path.stat().st_mode & 0o777 == 0o700
    running.close()
    assert sweep() == []
    assert not running.path.exists()


def test_a_folder_that_is_left_on_purpose_stays(parent):
    folder = PrivateFolder()
    folder.open()
    folder.leave()
    assert sweep() == []
    assert folder.path.is_dir()


def test_a_lock_that_another_start_holds_is_respected(parent):
    left = dead(parent)
    with (left / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep() == []


def test_a_process_of_a_dead_deployment_is_ended_and_no_other(parent, monkeypatch):
    monkeypatch.setattr(private_folder, "GRACE_S", 0.0)
    left = dead(parent)
    folders = [str(left), str(parent)]
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS, each], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for each in folders
    ]
    try:
        for holder in holders:
            holder.stdout.readline()
        assert sweep() == [left]
        assert holders[0].wait(10) == -9
        assert holders[1].poll() is None
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_only_helpers_that_this_process_started_are_ended(tmp_path):
    asks = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    own = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], **asks)
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    other = subprocess.Popen([sys.executable, "-c", starts, HOLDS, str(tmp_path)], **asks)
    try:
        for holder in (own, other):
            holder.stdout.readline()
        private_folder.end_users_of(tmp_path, only_helpers=True)
        assert own.wait(10) == -9
        assert other.poll() is None
    finally:
        for holder in (own, other):
            holder.communicate()  # closes standard input, which makes all of these processes exit


def test_a_link_is_not_followed(parent, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK).touch()
    (parent / "baton-link").symlink_to(elsewhere)
    assert sweep() == []
    assert os.listdir(elsewhere) == [LOCK]
