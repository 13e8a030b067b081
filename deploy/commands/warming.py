"""Carries out `baton store warm`: sends the prompts of a file to a gateway, and waits until the
stores have pulled the prompts' blocks. Each line of the file is one JSON object.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from deploy.admin.client import AdminError
from deploy.admin.schema import StoreInfo
from deploy.commands.chat import error_message
from engine.clock import Clock
from engine.errors import ConfigError

POLL_EVERY_S = 0.5
# Stores are done after this time without new or pulled blocks; they report every second.
QUIET_S = 3.0
MAX_ERRORS = 5  # maximum number of errors that are reported
MAX_LINE_BYTES = 32 * 2**20

Pause = Callable[[float], object]


class WarmPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt in the form that clients send: a text, tokens, or the messages of a chat."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give `prompt` or `messages`")
        if not self.prompt and not self.messages:
            raise ValueError("the prompt is empty")

    @property
    def path(self) -> str:
        """The URL path of the gateway's endpoint for this prompt."""
        return "/v1/completions" if self.messages is None else "/v1/chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        """Returns the body of a request that generates one token."""
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


class WarmedPrompts(msgspec.Struct, frozen=True):
    """The counts of computed prompts and of failures.

    `errors` are the texts of the first failures.
    """

    num_prompts: int
    num_failed: int
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in caches
    errors: list[str]


class KeptTokens(msgspec.Struct, frozen=True):
    """The number of tokens in a store's blocks, by tier. A block may be in several tiers."""

    store: str
    by_tier: dict[str, int]


class _Tally:
    """The counts of the prompts sent so far. All sending threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num = self.num_failed = self.prompt_tokens = self.cached_tokens = 0
        self.errors: list[str] = []

    def answered(self, usage: Any) -> None:
        details = usage.get("prompt_tokens_details") or {}
        with self._lock:
            self.num += 1
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.cached_tokens += details.get("cached_tokens") or 0

    def failed(self, reason: str) -> None:
        with self._lock:
            self.num += 1
            self.num_failed += 1
            if len(self.errors) < MAX_ERRORS:
                self.errors.append(reason)


def compute(
    client: httpx.Client, prompts: Iterable[WarmPrompt], *, model: str, num_at_once: int
) -> WarmedPrompts:
    """Sends each prompt as a request for one token, with `num_at_once` requests at a time.

    Counts failures.
    """
    left, lock, tally = iter(prompts), threading.Lock(), _Tally()
    is_over = threading.Event()

    def following() -> Iterator[WarmPrompt]:
        while not is_over.is_set():
            with lock:
                found = next(left, None)
            if found is None:
                return
            yield found

    def run() -> None:
        for prompt in following():
            _ask(client, prompt, model, tally)

    with ThreadPoolExecutor(num_at_once, "warm") as threads:
        running = [threads.submit(run) for _ in range(num_at_once)]
        try:
            for each in running:
                each.result()
        finally:
            is_over.set()
    return WarmedPrompts(
        tally.num, tally.num_failed, tally.prompt_tokens, tally.cached_tokens, tally.errors
    )


def _ask(client: httpx.Client, prompt: WarmPrompt, model: str, tally: _Tally) -> None:
    try:
        answer = client.post(prompt.path, json=prompt.body(model))
        if answer.status_code != 200:
            tally.failed(error_message(answer.content))
            return
        tally.answered(answer.json().get("usage") or {})
    except (httpx.HTTPError, ValueError) as error:
        tally.failed(str(error) or type(error).__name__)


def until_taken(
    ask: Callable[[], Sequence[StoreInfo]], *, clock: Clock, pause: Pause, timeout_s: float
) -> Sequence[StoreInfo]:
    """Waits until no store has new blocks to pull, and no store has pulled blocks for `QUIET_S`.

    Raises AdminError if the stores are not done within `timeout_s`, or if no store is connected.
    """
    begun_s = quiet_s = clock.now_s()
    before: object = None
    while True:
        stores = [each for each in ask() if each.is_connected]
        now_s = clock.now_s()
        seen = [(each.name, each.counters.get("taken_blocks", 0)) for each in stores]
        num_new = sum(each.num_new for each in stores)
        if num_new or not stores or seen != before:
            quiet_s = now_s
        elif now_s - quiet_s >= QUIET_S:
            return stores
        before = seen
        if now_s - begun_s >= timeout_s:
            what = f"{num_new} blocks are still new to them" if stores else "none is connected"
            raise AdminError(f"the stores are not done after {timeout_s:g} s: {what}")
        pause(POLL_EVERY_S)


def kept_by(stores: Sequence[StoreInfo]) -> list[KeptTokens]:
    """Returns for each store the number of tokens in each tier."""
    return [
        KeptTokens(
            each.name, {tier.medium: tier.num_blocks * each.block_size for tier in each.tiers}
        )
        for each in stores
    ]
