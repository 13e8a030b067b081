"""The `baton` command: registers the subcommands. Only this module prints errors."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from deploy.commands.chat import ChatClient, converse, first_model
from deploy.commands.configuration import config_app
from deploy.commands.doctor import doctor
from deploy.commands.events import events_app
from deploy.commands.keys import keys_app
from deploy.commands.operator import operator_app
from deploy.commands.store import store_app
from deploy.commands.up import up_app
from deploy.commands.versions import update_app
from deploy.local.leaving import end
from engine.config import ENVIRONMENT_PREFIX
from engine.errors import BatonError, ConfigError


class LateCommand(NamedTuple):
    """A command that is imported only when it is called."""

    target: str  # "module:attribute"
    help: str  # help line in lists of commands; to print a list, nothing is imported


# The import of these commands takes longer than most other commands run. `bench` is another
# package, which may not be installed.
LATE_COMMANDS = {
    "serve": LateCommand(
        "deploy.commands.serve:serve",
        "Serves a model until Ctrl-C; without MODEL, a small real one that pip fetches.",
    ),
    "bench": LateCommand("bench.cli:app", "Measure a server, or a part of one."),
    "simulate": LateCommand(
        "bench.simulator.cli:simulate_command",
        "Play a trace against a simulated cluster and report latency, goodput, hits and cost.",
    ),
    "plan": LateCommand(
        "bench.planner.cli:plan_command",
        "Plan how many GPUs a load needs, in which pools, at what cost, and what options save.",
    ),
}


def load_command(name: str) -> typer.Typer:
    """Imports a late command. Raises ConfigError if its package is not installed."""
    module, _, attribute = LATE_COMMANDS[name].target.partition(":")
    if not _is_installed(name):
        package = module.partition(".")[0]
        raise ConfigError(f"`baton {name}` needs the package `{package}`, which is not installed")
    found = getattr(importlib.import_module(module), attribute)
    return found if isinstance(found, typer.Typer) else _app_of(found)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(LATE_COMMANDS[name].target.partition(".")[0]) is not None


def _app_of(command: Callable[..., None]) -> typer.Typer:
    alone = typer.Typer(add_completion=False)
    alone.command()(command)
    return alone


class _Commands(TyperGroup):
    """The subcommands, including the late commands.

    The methods override methods of click. Their types are `Any`, because some versions of typer
    include their own copy of click.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._only_lists = False
        late = {
            name: TyperCommand(name, callback=None, help=command.help)
            for name, command in LATE_COMMANDS.items()
            if _is_installed(name)
        }
        self.commands = {**late, **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._only_lists or cmd_name not in LATE_COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(load_command(cmd_name))
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Lists late commands inside this context without importing them."""
        self._only_lists = True
        try:
            yield
        finally:
            self._only_lists = False


app = typer.Typer(
    cls=_Commands,
    help="Baton serves large language models with prefill and decode on separate pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group in (operator_app, events_app, update_app, up_app):
    app.add_typer(group)
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.add_typer(config_app, name="config")
app.command()(doctor)


def _answer_version(asked: bool) -> None:  # noqa: FBT001 - called by typer
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "-V", "--version", help="print the version", is_eager=True, callback=_answer_version
        ),
    ] = False,
) -> None:
    """Takes the options that come before a subcommand."""


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="URL of the server")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="model name (default: the first that is served)")
    ] = None,
    temperature: Annotated[float, typer.Option(help="of sampling; 0 is greedy")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an answer")] = 256,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="key of the server")] = "",
) -> None:
    """Chats with a server in the terminal."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(10.0, read=120.0)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
        name = model or first_model(client)
        options = {"temperature": temperature, "max_tokens": max_tokens}
        console = Console()
        console.print(f"{name} at {url}; /help lists commands, Ctrl-D ends\n", highlight=False)
        converse(ChatClient(client, name, options), console)


@app.command()
def version() -> None:
    """Prints the version."""
    typer.echo(f"baton {importlib.metadata.version('baton-serve')}")


def check_texts(arguments: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError for an argument or a setting in the environment that is not UTF-8.

    Python keeps such bytes as surrogates, which cannot be encoded in messages or files.
    """
    for number, argument in enumerate(arguments, start=1):
        if not _is_utf8(argument):  # the argument may be a secret key, so it is not printed
            raise ConfigError(f"argument {number} is not valid UTF-8")
    for name, value in environment.items():
        if name.startswith(ENVIRONMENT_PREFIX) and not _is_utf8(name + value):
            raise ConfigError(f"{name!a} in the environment is not valid UTF-8")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def main() -> None:
    """Runs the command. A BatonError is printed as one line and gives exit status 1."""
    try:
        check_texts(sys.argv[1:], os.environ)
        app()
    except BatonError as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        if sys.argv[1:2] != ["serve"]:
            raise
        # Exit without freeing torch and Ray, which would take a second.
        end(ended.code if isinstance(ended.code, int) else bool(ended.code))


if __name__ == "__main__":
    main()
