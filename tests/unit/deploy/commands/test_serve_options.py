"""Options of `baton serve` whose text means something else than itself."""

import os
import sys

import pytest

from deploy.commands.serve import parse_tokens, start_again, without_keys
from engine.config import load_config
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
