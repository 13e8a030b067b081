"""The files of a cache that count as the user's own files."""

import grp
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import ownership
from engine.errors import UntrustedFile
from engine.ownership import make_folder, require_trusted, require_trusted_files


@pytest.fixture
def folder(tmp_path) -> Path:
    make_folder(tmp_path / "one" / "two", top=tmp_path, mode=0o700)
    return tmp_path / "one" / "two"


def test_folders_are_private_for_every_umask(tmp_path):
    umask = os.umask(0)
    try:
        make_folder(tmp_path / "a" / "b", top=tmp_path, mode=0o755)
    finally:
        os.umask(umask)
    assert [(tmp_path / part).stat().st_mode & 0o777 for part in ("a", "a/b")] == [0o755, 0o755]


def test_a_sticky_shared_top_is_accepted(folder, tmp_path):
    tmp_path.chmod(0o1777)
    require_trusted(folder, top=tmp_path)
    folder.chmod(0o1777)
    with pytest.raises(UntrustedFile, match=f"{folder} .*everyone can write to it"):
        require_trusted(folder, top=tmp_path)


@pytest.mark.parametrize(("members", "is_own"), [([], True), (["eve"], False)])
def test_only_the_users_own_group_may_write(folder, tmp_path, monkeypatch, members, is_own):
    folder.chmod(0o770)
    os.chown(folder, -1, os.getegid())
    group = SimpleNamespace(gr_name="ann", gr_mem=members)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    monkeypatch.setattr(ownership.pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="ann"))
    if is_own:
        require_trusted(folder, top=tmp_path)
    else:
        with pytest.raises(UntrustedFile, match="its group can write to it"):
            require_trusted(folder, top=tmp_path)


def test_every_file_of_a_folder_is_checked(folder, tmp_path):
    (folder / "fine").touch(mode=0o644)
    require_trusted_files(folder, top=tmp_path)
    (folder / "link").symlink_to("fine")
    with pytest.raises(UntrustedFile, match="symbolic link"):
        require_trusted_files(folder, top=tmp_path)


def test_files_of_inner_folders_are_checked_too(folder, tmp_path):
    inner = folder / "inner"
    inner.mkdir(mode=0o755)
    (inner / "file").touch(mode=0o644)
    require_trusted_files(folder, top=tmp_path)
    (inner / "file").chmod(0o646)
    with pytest.raises(UntrustedFile, match="file"):
        require_trusted_files(folder, top=tmp_path)


def test_a_folder_of_too_many_files_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "MAX_FILES", 2)
    for name in "abc":
        (folder / name).touch(mode=0o644)
    with pytest.raises(UntrustedFile, match="more than 2 files"):
        require_trusted_files(folder, top=tmp_path)
