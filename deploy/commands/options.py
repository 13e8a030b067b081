"""Options that several subcommands share, and the connection to the admin API that they select.

A subcommand raises a BatonError, and `deploy.commands.main.main` prints it in one line and exits
with status 1.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from deploy.admin.client import connect
from deploy.admin.schema import PoolsAnswer
from deploy.commands.views import Output
from deploy.logs.lines import CONTROLLER
from engine.errors import BatonError, ConfigError

Names = Callable[[PoolsAnswer], Iterable[tuple[str, str]]]  # yields (name, description)

AdminUrl = Annotated[
    str | None,
    typer.Option(
        "--admin-url",
        envvar="BATON_ADMIN_URL",
        help="URL of the admin API (default: the deployment of this machine)",
    ),
]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="BATON_ADMIN_KEY", help="key of the admin API")
]
DeploymentName = Annotated[
    str | None,
    typer.Option(
        "--deployment",
        envvar="BATON_DEPLOYMENT",
        metavar="NAME|PORT",
        help="deployment of this machine: its admin.name, or a port (default: the only one)",
    ),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the change is complete")]
Watch = Annotated[bool, typer.Option("--watch", help="refresh every second until Ctrl-C")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Prefill = Annotated[int | None, typer.Option(help="prefill workers")]
Decode = Annotated[int | None, typer.Option(help="decode workers")]
Mixed = Annotated[int | None, typer.Option(help="workers that do both")]
COMPLETES_WITHIN_S = 2.0  # time limit for each completion in a shell


def _completions(context: typer.Context, incomplete: str, of: Names) -> list[tuple[str, str]]:
    """Queries the selected deployment for completions. Without an answer, returns an empty list."""
    url, key, name = (context.params.get(each) for each in ("admin_url", "admin_key", "deployment"))
    try:
        with connect(url, key, name) as client:
            found = list(of(client.pools(timeout_s=COMPLETES_WITHIN_S)))
    except BatonError:  # a shell cannot display the reason during completion
        return []
    return [(word, about) for word, about in found if word.startswith(incomplete)]


def _workers(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _completions(
        context,
        incomplete,
        lambda pools: ((w.worker_id, f"{w.role or w.target}, {w.state}") for w in pools.workers),
    )


def _services(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    def named(pools: PoolsAnswer) -> Iterator[tuple[str, str]]:
        yield from ((w.worker_id, f"{w.role or w.target}, {w.state}") for w in pools.workers)
        yield from ((gateway.name, f"gateway, {gateway.state}") for gateway in pools.gateways)
        yield CONTROLLER, "news of the pools"

    return _completions(context, incomplete, named)


def _versions(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _completions(
        context, incomplete, lambda pools: ((v.name, v.model_name) for v in pools.versions)
    )


WorkerName = Annotated[str, typer.Argument(metavar="WORKER", autocompletion=_workers)]
ServiceName = Annotated[
    str | None,
    typer.Argument(
        metavar="[SERVICE]",
        help="a worker, a gateway, or controller (default: all)",
        autocompletion=_services,
    ),
]
VersionName = Annotated[str, typer.Argument(metavar="VERSION", autocompletion=_versions)]
KeyName = Annotated[str, typer.Argument(metavar="NAME")]
ClusterFile = Annotated[
    Path, typer.Option("-c", "--config", help="baton.yaml: cluster, model, pools")
]
KeysFile = Annotated[
    Path,
    typer.Option("--file", envvar="BATON_GATEWAY__KEYS_FILE", help="the file of gateway.keys_file"),
]


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class _Given(NamedTuple):
    url: str | None = None
    key: str | None = None
    deployment: str | None = None
    as_json: bool = False


def operates(
    register: Callable[[Callable[..., None]], object],
) -> Callable[[Callable[..., None]], None]:
    """Registers a command whose first two parameters are a client of the admin API and an `Output`.

    The command gets the options that select the client, and `--json`. A group's options apply to
    its subcommands too. The group itself is called only without a subcommand.
    """

    def declare(command: Callable[..., None]) -> None:
        def run(
            context: typer.Context,
            deployment: DeploymentName = None,
            admin_url: AdminUrl = None,
            admin_key: AdminKey = None,
            as_json: AsJson = False,  # noqa: FBT002 - typer passes it by name
            **given: Any,
        ) -> None:
            group = context.obj or _Given()
            context.obj = chosen = _Given(
                admin_url or group.url,
                admin_key or group.key,
                deployment or group.deployment,
                as_json or group.as_json,
            )
            if context.invoked_subcommand is None:
                with connect(chosen.url, chosen.key, chosen.deployment) as client:
                    command(client, Output(as_json=chosen.as_json), **given)

        context, *options, _ = signature(run).parameters.values()
        _, _, *own = signature(command).parameters.values()
        shown = [context, *own, *(each.replace(kind=each.KEYWORD_ONLY) for each in options)]
        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in shown}
        run.__doc__ = command.__doc__
        register(run)

    return declare


def parse_seconds(text: str) -> float:
    """Parses a duration such as 90, 90s, 1.5m or 1h; returns seconds. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smh]?)", text)
    if found is None:
        raise ConfigError(f"{text!r} is no length of time: write 90, 90s, 1.5m or 1h")
    return float(found[1]) * _SECONDS[found[2]]


def parse_numbers(
    texts: Iterable[str], form: str, names: Sequence[str] | None = None
) -> dict[str, int]:
    """Parses texts such as "prefill=3". Returns the numbers by name. Raises ConfigError.

    `form` is the syntax for error texts, such as "ROLE=NUMBER". `names` are the allowed names;
    None: any name.
    """
    numbers: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        is_known = bool(name) if names is None else name in names
        if not is_known or not number.isdecimal() or name in numbers:
            kind = form.partition("=")[0].lower()
            known = "" if names is None else f", one of {', '.join(names)}"
            raise ConfigError(f"{text!r} is not {form}, with each {kind} once{known}")
        numbers[name] = int(number)
    return numbers
