"""Options that several subcommands share, and the connection that the operator's options lead to.

Errors have one place too: a subcommand raises a BatonError, and `deploy.commands.main.main` prints
it in one line and exits with status 1.
"""

from pathlib import Path
from typing import Annotated

import typer

from deploy.admin.client import AdminClient, connect

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


def is_group_call(context: typer.Context, url: str | None, key: str | None) -> bool:
    """Returns true if a group was called without a subcommand.

    Otherwise it keeps the options given to the group for `connect_below`.
    """
    context.obj = (url, key)
    return context.invoked_subcommand is None


def connect_below(context: typer.Context, url: str | None, key: str | None) -> AdminClient:
    """Connects for a subcommand of a group: options may be given to either. Raises AdminError."""
    group_url, group_key = context.obj
    return connect(url or group_url, key or group_key)
