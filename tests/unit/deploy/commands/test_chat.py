"""`baton chat`: commands, parameters, files, and a conversation with a fake server."""

import io
import stat

import httpx
import msgspec
import pytest
from rich.console import Console

from deploy.commands.chat import (
    COMMANDS,
    ChatClient,
    ChatCommands,
    ChatRefused,
    converse,
    history_file,
)


class FakeServer:
    """Answers each chat with its number of messages; refuses a temperature above 2."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content)
        self.bodies.append(body)
        if body.get("temperature", 0) > 2:
            return httpx.Response(400, json={"error": {"message": "temperature is too high"}})
        piece = {"choices": [{"delta": {"content": f"{len(body['messages'])} heard"}}]}
        events = f"data: {msgspec.json.encode(piece).decode()}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, text=events)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def client(server):
    transport = httpx.MockTransport(server)
    with httpx.Client(base_url="http://server", transport=transport) as http:
        yield ChatClient(http, "tiny", {"temperature": 0.7})


def talk(client: ChatClient, monkeypatch, *lines: str) -> str:
    """Returns the output for these input lines."""
    left = iter(lines)

    def read(_prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    converse(client, Console(file=out, width=200))
    return out.getvalue()


def test_each_question_carries_the_conversation_and_the_system_message(client, server, monkeypatch):
    said = talk(client, monkeypatch, "/system Be brief.", "yo", "and now?", "/reset", "again")
    assert "2 heard" in said
    assert "4 heard" in said
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 2]
    assert all(b["messages"][0]["content"] == "Be brief." for b in server.bodies)
    assert all(body["stream"] for body in server.bodies)


def test_parameters_are_set_shown_and_left_out(client, server, monkeypatch):
    said = talk(
        client, monkeypatch, '/set top_p=0.5 stop=["a"] user=me', "yo", "/unset top_p user", "yo"
    )
    assert 'temperature=0.7 top_p=0.5 stop=["a"] user="me"' in said
    assert (server.bodies[0]["top_p"], server.bodies[0]["stop"]) == (0.5, ["a"])
    assert server.bodies[0]["user"] == "me"
    assert "top_p" not in server.bodies[1]


def test_refused_question_is_taken_back_and_can_be_asked_again(client, server, monkeypatch):
    said = talk(client, monkeypatch, "/set temperature=9", "yo", "/set temperature=1", "yo")
    assert "temperature is too high" in said
    assert len(server.bodies[1]["messages"]) == 1


def test_retry_asks_for_the_last_answer_again(client, server, monkeypatch):
    said = talk(client, monkeypatch, "/retry", "one", "two", "/retry")
    assert "nothing was asked yet" in said
    assert server.bodies[2]["messages"] == server.bodies[1]["messages"]
    assert len(client.messages) == 4


def test_line_that_begins_with_a_slash_can_be_sent(client, server, monkeypatch):
    said = talk(client, monkeypatch, "//etc/passwd is what?", "/nonsense", "/exit", "unsent")
    assert server.bodies[0]["messages"][0]["content"] == "/etc/passwd is what?"
    assert "/nonsense is no command" in said
    assert len(server.bodies) == 1


def test_conversation_is_saved_in_a_new_private_file(client, tmp_path, monkeypatch):
    path = tmp_path / "talk.json"
    said = talk(client, monkeypatch, "/system hm", "yo", f"/save {path}", f"/save {path}", "/save")
    saved = msgspec.json.decode(path.read_bytes())
    assert [each["role"] for each in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["model"] == "tiny"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "File exists" in said
    assert "write /save FILE" in said


@pytest.mark.parametrize("words", ["temperature", "=1", "messages=[]", "stream=false", "a-b=1"])
def test_wrong_parameters_are_refused(client, words):
    with pytest.raises(ChatRefused):
        ChatCommands(client).carried_out(f"/set {words}")


def test_help_names_every_command(client):
    said = ChatCommands(client).carried_out("/help")
    assert all(usage in said for usage in COMMANDS)


def test_history_is_in_the_state_folder():
    assert str(history_file({"XDG_STATE_HOME": "/s"})) == "/s/baton/chat_history"
