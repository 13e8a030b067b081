"""Options of `baton serve` whose text is converted to other settings."""

import os
import sys

import pytest
from typer.testing import CliRunner

from deploy.base.defaults import BUNDLED_DRAFT, BUNDLED_MODEL
from deploy.commands import serve
from deploy.commands.main import app
from deploy.commands.serve import parse_tokens, start_again, without_keys
from engine.config import StoreConfig, load_config
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("1M", 2**20),
        ("1.5m", 1500000),
    ],
)
def test_tokens_are_written_as_with_vllm(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4 k", "4kk", "-1", "1.5K", "1.2345k", "auto", "1e3"])
def test_other_texts_are_no_tokens(text):
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse_tokens(text)


def test_keys_leave_the_command_line_for_the_environment(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    line = ["python", "-m", "baton", "serve", "--api-key", "a", "m", "--api-key=b", "--port", "1"]
    start_again(without_keys(line), ["a", 'b"'])
    [(program, command, environment)] = calls
    assert program == sys.executable
    assert command == ["python", "-m", "baton", "serve", "m", "--port", "1"]
    known = load_config(None, environment, {}).gateway.key_hashes
    assert len(known) == 2


class SeenOptions(Exception):
    """Stops the command where it would read the configuration."""


def settings_of(monkeypatch, *words):
    """Returns the configuration that these options produce."""
    found = {}

    def read(path, _, flags):
        found["config"] = load_config(path, {}, flags)
        raise SeenOptions

    monkeypatch.setattr(serve, "load_config", read)
    done = CliRunner().invoke(app, ["serve", *words])
    if "config" not in found:
        raise done.exception
    return found["config"]


def test_short_options_give_the_settings_of_the_store(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["--store", "512", "--store-disk", "kv", "--store-disk-gib", "1.5"]
    found = settings_of(monkeypatch, *words)
    assert found.store == StoreConfig(memory_mib=512, disk=str(tmp_path / "kv"), disk_gib=1.5)
    assert settings_of(monkeypatch, "--store", "64").store == StoreConfig(memory_mib=64)
    assert not settings_of(monkeypatch).store.is_on


def test_a_disk_without_memory_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"need store\.memory_mib"):
        settings_of(monkeypatch, "--store-disk", str(tmp_path))


def test_only_the_toy_has_a_draft_model_by_default(monkeypatch):
    speculate = ("--speculate", "auto")
    assert settings_of(monkeypatch, *speculate).worker.draft_model is None
    for toy in ("bundled", str(BUNDLED_MODEL)):
        found = settings_of(monkeypatch, toy, *speculate)
        assert found.worker.draft_model == str(BUNDLED_DRAFT)
