"""The file of `baton store warm`: prompts, one JSON object a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError

MAX_LINE_BYTES = 32 * 2**20


class WarmPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt as clients send it: a text or tokens, or the messages of a chat."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give `prompt` or `messages`")
        if not self.prompt and not self.messages:
            raise ValueError("the prompt is empty")

    @property
    def path(self) -> str:
        """The path of the endpoint for this prompt."""
        return "/v1/completions" if self.messages is None else "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Returns a request for one token."""
        asked: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
        if self.messages is None:
            return {**asked, "prompt": self.prompt}
        return {**asked, "messages": self.messages}


def read_prompts(path: Path) -> Iterator[WarmPrompt]:
    """Yields the prompts of a file; empty lines are skipped. Raises ConfigError with the line."""
    decoder = msgspec.json.Decoder(WarmPrompt)
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}, line {number}: more than {MAX_LINE_BYTES} bytes")
                if not line.strip():
                    continue
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
