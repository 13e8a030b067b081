"""`baton config show`, `reference` and `check`: print all settings, and the values in force."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from deploy.base.defaults import load_up_config
from deploy.commands.options import AsJson
from deploy.commands.views import Output, table_of
from engine.config import Config, load_config
from engine.config_reference import config_keys, reference_text, settings_of

config_app = typer.Typer(
    help="Keys of the configuration: what they mean, what is in force, what is wrong.",
    no_args_is_help=True,
)
ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", help="TOML file of `baton serve`, or baton.yaml")
]


@config_app.command("show")
def show_command(
    config: ConfigFile = None,
    *,
    changed: Annotated[bool, typer.Option("--changed", help="only what is no default")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows every key with the value that the file and the environment give it."""
    rows = [row for row in settings_of(configured(config)) if not (changed and row[2])]
    if as_json:
        values = {key.name: {"value": value, "is_default": same} for key, value, same in rows}
        Output(as_json=True).json(values)
        return
    table = table_of("configuration", ("key", "value", ""), (), wraps=("value",))
    for key, value, is_default in rows:
        style = "dim" if is_default else "bold"
        origin = "default" if is_default else "set"
        table.add_row(key.name, escape(value), origin, style=style)
    Console().print(table)


@config_app.command("reference")
def reference_command(*, as_json: AsJson = False) -> None:
    """Prints every key with its type, default and meaning, as Markdown."""
    if as_json:
        keys: list[dict[str, Any]] = [
            {**msgspec.to_builtins(key), "variable": key.variable} for key in config_keys()
        ]
        Output(as_json=True).json(keys)
        return
    typer.echo(reference_text(), nl=False)


@config_app.command("check")
def check_command(config: ConfigFile = None) -> None:
    """Checks a file and the environment. Status 1 names what is wrong and which keys are near."""
    checked = configured(config)
    count = sum(not is_default for _, _, is_default in settings_of(checked))
    source = "the environment" if config is None else escape(str(config))
    Console().print(f"[green]✓[/green] {source}: {count} settings differ from their defaults")


def configured(path: Path | None) -> Config:
    """Returns the configuration that a deployment with this file would use. Raises ConfigError."""
    if path is not None and path.suffix in (".yaml", ".yml"):
        return load_up_config(path).config
    return load_config(path, os.environ, {})
