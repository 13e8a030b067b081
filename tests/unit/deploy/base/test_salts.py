"""The secret under which block hashes are computed is stored wherever blocks are stored."""

import pytest

from deploy.base.salts import kept_salts
from engine.config import StoreConfig
from engine.errors import ConfigError


def test_without_kept_blocks_there_is_none(tmp_path):
    assert kept_salts(StoreConfig()) is None
    assert kept_salts(StoreConfig(memory_mib=1)) is None
    assert kept_salts(StoreConfig(salts=str(tmp_path / "s"))) is None  # no store is configured
    assert not list(tmp_path.iterdir())


def test_it_is_made_once_beside_the_disk_or_where_it_is_named(tmp_path):
    config = StoreConfig(memory_mib=1, disk=str(tmp_path / "kv"))
    first = kept_salts(config)
    assert first is not None
    assert kept_salts(config) == first
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["salts"]
    assert (tmp_path / "kv" / "salts").stat().st_mode & 0o777 == 0o600
    other = kept_salts(StoreConfig(memory_mib=1, salts=str(tmp_path / "mine")))
    assert other not in (None, first)


@pytest.mark.parametrize("text", ["", "0" * 63, "g" * 64, "0" * 200])
def test_a_file_without_a_secret_is_refused(tmp_path, text):
    path = tmp_path / "salts"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hex digits"):
        kept_salts(StoreConfig(memory_mib=1, salts=str(path)))


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "salts"
    path.write_text("0" * 64)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="other users"):
        kept_salts(StoreConfig(memory_mib=1, salts=str(path)))


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"store\.salts"):
        kept_salts(StoreConfig(memory_mib=1, disk=str(tmp_path / "file" / "kv")))
