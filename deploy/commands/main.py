"""The `baton` command."""

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from deploy.commands.chat import ChatClient, converse, first_model
from deploy.commands.keys import keys_app
from deploy.commands.operator import register
from deploy.commands.up import add_commands as add_cluster_commands
from deploy.commands.versions import register as register_versions
from engine.errors import BatonError


def _serve() -> typer.Typer:
    from deploy.commands.serve import serve

    return _app_of(serve)


def _bench() -> typer.Typer:
    from bench.cli import app

    return app


def _simulate() -> typer.Typer:
    from bench.simulator.cli import simulate_command

    return _app_of(simulate_command)


def _plan() -> typer.Typer:
    from bench.planner.cli import plan_command

    return _app_of(plan_command)


def _app_of(command: Callable[..., None]) -> typer.Typer:
    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    return alone


_LATE = {"serve": _serve, "bench": _bench, "simulate": _simulate, "plan": _plan}


class _Commands(TyperGroup):
    """Imports some commands only when they are asked for: it takes longer than most others do.

    Types are those of click, of which some versions of typer have one of their own.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_LATE, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _LATE:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(_LATE[cmd_name]())
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    help="Baton serves large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
register(app)
register_versions(app)
add_cluster_commands(app)
app.add_typer(keys_app, name="keys")


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="server")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="default: the server's first")] = None,
    temperature: Annotated[float, typer.Option()] = 0.7,
    max_tokens: Annotated[int, typer.Option()] = 256,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY")] = "",
) -> None:
    """Talks to a server in the terminal."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(10.0, read=120.0)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
        name = model or first_model(client)
        options = {"temperature": temperature, "max_tokens": max_tokens}
        console = Console()
        console.print(f"{name} at {url}; Ctrl-D ends\n", highlight=False)
        converse(ChatClient(client, name, options), console)


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(f"baton {importlib.metadata.version('baton-serve')}")


def main() -> None:
    """Runs the command; an error that Baton raises on purpose is one line and exit status 1."""
    try:
        app()
    except BatonError as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
