"""Files of prompts: what is read, and which line is wrong."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.commands.store import prompts
from deploy.commands.store.prompts import WarmPrompt, read_prompts
from engine.errors import ConfigError


def test_prompts_and_messages_become_requests_for_one_token(tmp_path):
    path = tmp_path / "prompts"
    path.write_text(
        '{"prompt": "a b"}\n\n{"prompt": [1, 2]}\n{"messages": [{"role": "user", "content": "c"}]}'
    )
    text, tokens, chat = read_prompts(path)
    same = {"model": "m", "max_tokens": 1, "temperature": 0}
    assert text.body("m") == {**same, "prompt": "a b"}
    assert tokens.body("m") == {**same, "prompt": [1, 2]}
    assert chat.body("m") == {**same, "messages": [{"role": "user", "content": "c"}]}
    assert (text.path, chat.path) == ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "truncated"),
        (b"7", "Expected `object`"),
        (b"{}", "give `prompt` or `messages`"),
        (b'{"prompt": "a", "messages": []}', "give `prompt` or `messages`"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"messages": []}', "the prompt is empty"),
        (b'{"prompts": "a"}', "unknown field `prompts`"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"messages": [' + b'{"a": ' * 5000, "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, reason):
    path = tmp_path / "prompts"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match="prompts, line 2") as error:
        list(read_prompts(path))
    assert reason in str(error.value)


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 20)
    path = tmp_path / "prompts"
    path.write_text('{"prompt": "' + "a" * 100)
    with pytest.raises(ConfigError, match="line 1: more than 20 bytes"):
        list(read_prompts(path))


def test_an_absent_file_is_an_error_of_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        list(read_prompts(tmp_path / "none"))


@given(st.binary(max_size=60))
def test_any_line_is_a_prompt_or_an_error(data):
    try:
        found = msgspec.json.decode(data, type=WarmPrompt)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert found.body("m")["max_tokens"] == 1
