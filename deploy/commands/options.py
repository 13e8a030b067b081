"""Options that several subcommands share, and the connection that the operator's options lead to.

Errors have one place too: a subcommand raises a BatonError, and `deploy.commands.main.main` prints
it in one line and exits with status 1.
"""

from collections.abc import Callable, Iterable, Sequence
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.admin.client import connect
from engine.errors import ConfigError

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
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the change is complete")]
Watch = Annotated[bool, typer.Option("--watch", help="refresh every second until Ctrl-C")]
Prefill = Annotated[int | None, typer.Option(help="prefill workers")]
Decode = Annotated[int | None, typer.Option(help="decode workers")]
Mixed = Annotated[int | None, typer.Option(help="workers that do both")]
WorkerName = Annotated[str, typer.Argument(metavar="WORKER")]
VersionName = Annotated[str, typer.Argument(metavar="VERSION")]
KeyName = Annotated[str, typer.Argument(metavar="NAME")]
ClusterFile = Annotated[
    Path, typer.Option("-c", "--config", help="baton.yaml: cluster, model, pools")
]
KeysFile = Annotated[
    Path,
    typer.Option("--file", envvar="BATON_GATEWAY__KEYS_FILE", help="the file of gateway.keys_file"),
]


def operates(
    register: Callable[[Callable[..., None]], object],
) -> Callable[[Callable[..., None]], None]:
    """Registers a command that gets a client of the admin API as its first parameter.

    The command has the options that lead to the client. Those of a group hold for its subcommands
    too. A group itself is called only without a subcommand.
    """

    def declare(command: Callable[..., None]) -> None:
        def run(
            context: typer.Context,
            admin_url: AdminUrl = None,
            admin_key: AdminKey = None,
            **given: Any,
        ) -> None:
            group_url, group_key = context.obj or (None, None)
            context.obj = (admin_url or group_url, admin_key or group_key)
            if context.invoked_subcommand is None:
                with connect(*context.obj) as client:
                    command(client, **given)

        context, *options, _ = signature(run).parameters.values()
        _, *own = signature(command).parameters.values()
        shown = [context, *own, *(each.replace(kind=each.KEYWORD_ONLY) for each in options)]
        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in shown}
        run.__doc__ = command.__doc__
        register(run)

    return declare


def parse_numbers(
    texts: Iterable[str], form: str, names: Sequence[str] | None = None
) -> dict[str, int]:
    """Reads numbers by name from texts like "prefill=3". Raises ConfigError.

    `form` shows the two parts, such as "ROLE=NUMBER". `names` are the allowed ones; None: any.
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
