"""The operator's two files that every node of a cluster gets."""

import pytest

from deploy.ray.cluster_nodes import CONSTRAINTS, write_files
from engine.errors import ConfigError


def test_token_is_made_once_and_readable_by_its_owner_only(tmp_path):
    write_files(tmp_path)
    token = tmp_path / ".baton" / "ray_auth_token"
    first = token.read_text()
    assert len(first) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    write_files(tmp_path)
    assert token.read_text() == first
    assert (token.parent / "constraints.txt").read_text() == CONSTRAINTS.read_text()
    assert {path.name for path in token.parent.iterdir()} == {"ray_auth_token", "constraints.txt"}


@pytest.mark.parametrize(("mode", "complaint"), [(0o644, "read by others"), (0o666, "write to it")])
def test_token_open_to_other_users_is_refused(tmp_path, mode, complaint):
    write_files(tmp_path)
    (tmp_path / ".baton" / "ray_auth_token").chmod(mode)
    with pytest.raises(ConfigError, match=complaint):
        write_files(tmp_path)


def test_folder_writable_by_others_is_refused(tmp_path):
    (tmp_path / ".baton").mkdir(mode=0o777)
    (tmp_path / ".baton").chmod(0o777)
    with pytest.raises(ConfigError, match="is not to be trusted"):
        write_files(tmp_path)
