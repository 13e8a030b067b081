"""Kit of the gateway's tests: a scripted router, a tiny text model, a direct ASGI driver."""

import asyncio
import itertools
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.config import GatewayConfig, RouterConfig
from engine.messages import FinishReason, RequestId, StoreHint, WorkerId
from engine.net.trust import Secret
from router.cluster.learning import MovedKv
from router.gateway.answering import GatewayParts
from router.gateway.app import app_of, parts_of
from router.gateway.requests.calls import GatewaySettings
from router.gateway.versions import ServedVersion, Versions
from router.machine.requests import Finished, Request, Stay, Timeline, Update
from router.port import FrameTaker, Handle, Sink, WorkerStatus
from router.text.templates import DEFAULT, ChatTemplates
from router.text.tokenizer import TextModel
from tests.kits.grammar_checks import CheckedAtOnce

SHOWN = ("keys", "edge", "background", "board", "logs_requests")  # arguments that go to `app_of`
V1 = ("version", "v1")  # the label of the served version
CONTEXT_LEN = 64
EOS = 256
PASSES = 10  # event loop passes after which all output of a step is written
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}"
    "{% endfor %}<|assistant|>"
)
SECRET = Secret("of the tests")
STOP = Finished(FinishReason.STOP)
LENGTH = Finished(FinishReason.LENGTH)
TIMELINE = Timeline(
    route_s=0.01,
    queue_s=0.02,
    prefill_queue_s=0.03,
    prefill_compute_s=0.04,
    kv_wait_s=0.05,
    kv_transfer_s=0.06,
    kv_exposed_s=0.007,
    num_cached_tokens=3,
    prefill_worker="p0",
    stays=(Stay("p0", "d0", 0.03, 0.06, 0.1, 0.15, 0.15),),
)


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer: ids 0 to 255 are bytes of these values; the special tokens follow."""
    tokenizer = Tokenizer(models.BPE(vocab=_letters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer


def _letters() -> dict[str, int]:
    """Returns GPT-2's letter for each byte: itself if printable, else from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


TOKENIZER = byte_tokenizer()


@cache
def _compiled(template: str) -> ChatTemplates:
    return ChatTemplates({DEFAULT: template}, {})


@cache
def text_model(template: str | None = TEMPLATE) -> TextModel:
    compiled = None if template is None else _compiled(template)
    return TextModel(TOKENIZER, templates=compiled, eos_token_ids=(EOS,))


def tokens(text: str, **rest: Any) -> Update:
    return Update(token_ids=tuple(text.encode()), **rest)


def answer(text: str) -> list[Update]:
    """Returns updates of one token each; the last is end-of-text with the outcome."""
    last = Update(token_ids=(EOS,), outcome=STOP, timeline=TIMELINE)
    return [*(Update(token_ids=(byte,)) for byte in text.encode()), last]


class Never:
    """A step of a script that the request never reaches."""


class FakeRouter:
    """Plays a script of updates for every request, and keeps the requests.

    With `more_scripts`, the first request gets `script`, and each later request the next script.
    """

    def __init__(
        self,
        script: list[Update | Never | Exception] | None = None,
        *more_scripts: list[Update | Never | Exception],
    ) -> None:
        self.script = script if script is not None else answer("hi")
        self.more_scripts = more_scripts
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.live = 0
        self.clock = TickingClock()  # the app's clock
        self.waiting = asyncio.Event()  # set when a request reaches a `Never`
        self.not_ready: str | None = None
        self.capacity: int | None = None  # capacity in tokens
        self.statuses: dict[WorkerId, WorkerStatus] = {}
        self.severed_pairs: list[tuple[WorkerId, WorkerId]] = []
        self.moved: list[MovedKv] = []
        self.events: dict[tuple[str, str], int] = {}
        self.store_block: int | None = None  # tokens per block of its stores; None: no store
        self.told: list[StoreHint] = []  # hints sent to its stores

    def submit(self, request: Request, sink: Sink) -> Handle:
        number = len(self.requests)
        self.requests.append(request)
        self.live += 1
        return _Played(self, request, sink, self._script_of(number))

    def _script_of(self, number: int) -> list[Update | Never | Exception]:
        return self.more_scripts[number - 1] if number and self.more_scripts else self.script

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        raise NotImplementedError("see tests.kits.router.batches")

    def readiness(self) -> str | None:
        return self.not_ready

    def capacity_tokens(self) -> int | None:
        return self.capacity

    def store_block_size(self) -> int | None:
        return self.store_block

    def tell_stores(self, hint: StoreHint) -> None:
        assert self.store_block is not None
        self.told.append(hint)

    def fingerprint(self) -> str:
        return "fp-1"

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        return self.statuses

    def queued_s(self) -> float:
        return 0.75

    def queue_len(self) -> int:
        return 7

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        return dict.fromkeys(self.severed_pairs, 3.0)

    def transfers(self) -> list[MovedKv]:
        return list(self.moved)

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        known = {request.request_id for request in self.requests}
        return {each: TIMELINE for each in request_ids if each in known}

    def counters(self) -> Mapping[tuple[str, str], int]:
        return self.events


class _Played:
    """A request whose script is playing. Its first step is played at once, later steps after some
    passes of the event loop.
    """

    def __init__(self, router: FakeRouter, request: Request, sink: Sink, script: list) -> None:
        self._router = router
        self._request = request
        self._sink = sink
        self._script = iter(script)
        self._is_over = self._is_cancelled = False
        self._step_after(0)

    def _step_after(self, num_passes: int) -> None:
        if num_passes:
            asyncio.get_running_loop().call_soon(self._step_after, num_passes - 1)
        elif not self._is_cancelled and (step := next(self._script, None)) is not None:
            self._play(step)

    def _play(self, step: Update | Never | Exception) -> None:
        if isinstance(step, Never):
            self._router.waiting.set()
            return
        if isinstance(step, Exception):
            self._sink.fail(step)
        elif step == Update(step.token_ids):
            self._sink.tokens(step.token_ids, self._router.clock.now_s())
        else:
            self._is_over = step.outcome is not None
            self._sink.update(step)
        self._step_after(PASSES)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._router.live -= 1
        if not self._is_over:
            self._router.cancelled.append(self._request.request_id)

    def offer_frames(self, taker: FrameTaker) -> None:
        """Does nothing: no worker sends frames."""


async def passes(number: int) -> None:
    """Waits for some passes of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


class TickingClock:
    """A clock that advances one second at every reading."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now_s(self) -> float:
        return float(next(self._ticks))


def versions_of(
    router: FakeRouter,
    *,
    template: str | None = TEMPLATE,
    model_names: tuple[str, ...] = ("tiny",),
    context_len: int = CONTEXT_LEN,
) -> Versions:
    """Returns a table with one served version."""
    return Versions(ServedVersion("v1", router, text_model(template), model_names, context_len))


def make_app(router: FakeRouter, *, template: str | None = TEMPLATE, **settings: Any) -> Any:
    own = {name: settings.pop(name) for name in ("model_names", "context_len") if name in settings}
    return make_app_of(versions_of(router, template=template, **own), router.clock, **settings)


def make_app_of(versions: Versions, clock: TickingClock, **settings: Any) -> Any:
    names = (*SHOWN, "in_python")
    own = {name: settings.pop(name) for name in names if name in settings}
    return create_app(versions, clock=clock, settings=settings_of(**settings), **own)


def settings_of(**changes: Any) -> GatewaySettings:
    """Returns settings with these changes to `[gateway]` and `[router]`; no call waits for a
    worker."""
    router = {"queue_timeout_s": 0.0}
    for name in RouterConfig.__struct_fields__:
        if name in changes:
            router[name] = changes.pop(name)
    return GatewaySettings(SECRET, GatewayConfig(**changes), RouterConfig(**router))


def create_app(versions: Versions, **own: Any) -> Any:
    shown = {name: own.pop(name) for name in SHOWN if name in own}
    return app_of(create_parts(versions, **own), **shown)


def create_parts(versions: Versions, *, in_python: bool = True, **own: Any) -> GatewayParts:
    """Creates an app's parts. With `in_python`, C++ does not decode tokens to text."""
    settings = own.pop("settings", None) or settings_of()
    own = {"rng": random.Random(1), "grammars": CheckedAtOnce(), **own}
    parts = parts_of(versions, settings=settings, **own)
    return replace(parts, batch=None) if in_python else parts


@dataclass
class Reply:
    """The response of an app."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def is_complete(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def events(self) -> list[Any]:
        """Returns the decoded events of a stream. The end marker stays text."""
        parts = self.body.split(b"\n\n")
        assert parts.pop() == b""
        assert all(part.startswith(b"data: {") or part == b"data: [DONE]" for part in parts)
        data = [part.removeprefix(b"data: ") for part in parts]
        return [part.decode() if part == b"[DONE]" else msgspec.json.decode(part) for part in data]


class Connection:
    """One HTTP request to an app, driven like an ASGI server does."""

    def __init__(self, app: Any, method: str, path: str, headers: Mapping[str, str]) -> None:
        self.reply = Reply()
        self._app = app
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "server": ("test", 80),
            "scheme": "http",
        }
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()

    def put_body(self, *pieces: bytes, complete: bool = True) -> None:
        for index, piece in enumerate(pieces):
            more = not complete or index + 1 < len(pieces)
            message = {"type": "http.request", "body": piece, "more_body": more}
            self._incoming.put_nowait(message)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def run(self) -> Reply:
        await self._app(self._scope, self._incoming.get, self._send)
        return self.reply

    async def _send(self, message: dict[str, Any]) -> None:
        assert not self.reply.is_complete
        self.reply.messages.append(dict(message))
        if self.reply.is_complete:
            self.leave()  # servers also send a disconnect here


async def fetch(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    connection = Connection(app, method, path, headers or {})
    connection.put_body(body)
    return await connection.run()


def get(app: Any, path: str, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(fetch(app, "GET", path, headers=named))


def post(app: Any, path: str, fields: Any, **headers: str) -> Reply:
    body = fields if isinstance(fields, bytes) else msgspec.json.encode(fields)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named.setdefault("content-type", "application/json")
    return asyncio.run(fetch(app, "POST", path, body, named))


def chat(router: FakeRouter, fields: Mapping[str, Any] | None = None, **headers: str) -> Reply:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "yo"}], **(fields or {})}
    return post(make_app(router), "/v1/chat/completions", body, **headers)


def complete(router: FakeRouter, fields: Mapping[str, Any] | None = None, **headers: str) -> Reply:
    body = {"model": "tiny", "prompt": "yo", **(fields or {})}
    return post(make_app(router), "/v1/completions", body, **headers)


def samples(app: Any) -> dict[str, dict[Any, float]]:
    """Returns all samples of /metrics, by name and then by labels."""
    text = get(app, "/metrics").body.decode()
    found: dict[str, dict[Any, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in series, f"{sample.name} {key} comes twice"
            series[key] = sample.value
    return found
