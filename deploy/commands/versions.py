"""Commands for versions of the model: `baton update`, `baton versions` and its subcommands."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.declared import absolute, read_declaration
from deploy.admin.schema import Declaration, PoolCounts, PoolsAnswer, UpdateBody
from deploy.base.defaults import load_up_config, pools_of, read_yaml
from deploy.commands.operator import follow
from deploy.commands.options import (
    Decode,
    Mixed,
    Prefill,
    VersionName,
    Wait,
    Watch,
    operates,
    parse_numbers,
    parse_seconds,
)
from deploy.commands.views import Output, versions_table
from engine.config import Config, load_config, read_toml
from engine.control import SERVING_ROLES
from engine.errors import ConfigError

WEIGHTS = "VERSION=WEIGHT"

update_app = typer.Typer()  # its commands are direct subcommands of `baton`
versions_app = typer.Typer(help="Versions of the model that are served side by side.")
update_app.add_typer(versions_app, name="versions")


@operates(update_app.command("update"))
def update_command(  # noqa: PLR0913 - a command's options
    client: AdminClient,
    output: Output,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="TOML file or baton.yaml: `worker`, pools and model name count"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="directory, hf://, s3:// or gs://")] = None,
    of: Annotated[
        str | None, typer.Option(help="name of a model in [models] (default: the main one)")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the version (default: the next of v1, v2, …)")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="name in the API (default: as now)")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(help="serve beside the others with this weight (default: take over)"),
    ] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    canary: Annotated[
        str | None,
        typer.Option(help="shares of new requests that come first, per cent: 5,25,50"),
    ] = None,
    hold: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="that each of them lasts at least: 90, 90s, 1.5m, 1h"),
    ] = None,
    *,
    allow_shorter: Annotated[
        bool,
        typer.Option("--allow-shorter", help="than sequences that run or ran lately"),
    ] = False,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="only show what the file declares otherwise; status 3 if so"),
    ] = False,
    wait: Wait = True,
) -> None:
    """Serves another model, or the same one with another configuration, without a pause.

    Workers of the new version start beside the running ones and take new requests as they become
    ready. If the new version does not start, or its requests fail or are late, it is given up.
    """
    if diff:
        declared = Declaration() if config is None else read_declaration(config)
        declared = msgspec.structs.replace(declared, model=absolute(model) or declared.model)
        output.differences(client.differences(declared))
        return
    body = UpdateBody() if config is None else read_update(config, of)
    counts = _counts(prefill, decode, mixed) or body.pools
    body = msgspec.structs.replace(
        body,
        of=of,
        name=name,
        model=absolute(model or body.model),
        model_name=model_name or body.model_name,
        pools=counts,
        weight=weight,
        canary=None if canary is None else _shares(canary),
        hold_s=None if hold is None else parse_seconds(hold),
        allows_shorter=allow_shorter,
    )
    answer = client.update(body)
    newest = [version for version in answer.versions if version.line == (of or "")][-1]
    _follow(client, output, answer, newest.name, wait=wait)


@operates(versions_app.callback(invoke_without_command=True))
def versions_command(client: AdminClient, output: Output, *, watch: Watch = False) -> None:
    """Shows the versions."""
    output.show(client.pools, versions_table, watch=watch)


@operates(versions_app.command("weight"))
def weight_command(
    client: AdminClient,
    output: Output,
    weights: Annotated[list[str], typer.Argument(metavar=f"{WEIGHTS}...")],
) -> None:
    """Shares new requests by weight: `baton versions weight v1=90 v2=10`."""
    follow(client, output, client.set_weights(parse_numbers(weights, WEIGHTS)), wait=False)


@operates(versions_app.command("finish"))
def finish_command(  # noqa: PLR0913 - a command's options
    client: AdminClient,
    output: Output,
    version: VersionName,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    *,
    wait: Wait = True,
) -> None:
    """Lets a version take over from all others, worker by worker."""
    answer = client.finish(version, _counts(prefill, decode, mixed))
    _follow(client, output, answer, version, wait=wait)


@operates(versions_app.command("rollback"))
def rollback_command(
    client: AdminClient,
    output: Output,
    version: Annotated[
        str | None, typer.Argument(help="a former version (default: the latest)")
    ] = None,
    *,
    wait: Wait = True,
) -> None:
    """Lets the version before take over again. One that takes over now is given up."""
    before = client.pools()
    answer = client.rollback(version)
    if before.taking_over is not None:
        follow(client, output, answer, wait=wait)
    else:
        _follow(client, output, answer, answer.taking_over or "", wait=wait)


@operates(versions_app.command("abort"))
def abort_command(
    client: AdminClient, output: Output, version: VersionName, *, wait: Wait = True
) -> None:
    """Gives all new requests to the current version. This one ends after its last request."""
    follow(client, output, client.abort(version), wait=wait)


def read_update(path: Path, of: str | None = None) -> UpdateBody:
    """Reads the settings of a version from a configuration file: `worker`, `pools`, model and name.

    `of` names a model in `[models]`; without it the main model is read. Fields that the file omits
    stay None. Other settings in the file are settings of the deployment, and are ignored. Raises
    ConfigError.
    """
    if path.suffix in (".yaml", ".yml"):
        up, tree = load_up_config(path), read_yaml(path)
        if of is not None:
            return _body_of_model(path, up.config, of)
        model = up.model if "model" in tree else None
        return msgspec.structs.replace(_body_of(up.config, tree), model=model)
    config = load_config(path, {}, {})
    return _body_of(config, read_toml(path)) if of is None else _body_of_model(path, config, of)


def _body_of_model(path: Path, config: Config, name: str) -> UpdateBody:
    model = config.models.get(name)
    if model is None:
        there = ", ".join(config.models) or "none"
        raise ConfigError(f"{path}: no model is called {name!r}; there are: {there}")
    pools = pools_of(model)
    return UpdateBody(
        model=model.model,
        worker=msgspec.to_builtins(model.worker),
        pools=PoolCounts(*(pools.of(role) for role in SERVING_ROLES)),
    )


def _body_of(config: Config, tree: Mapping[str, Any]) -> UpdateBody:
    """Returns the fields that the file sets.

    `tree` is the parsed file, and `config` was made from it.
    """
    pools = config.pools
    said = pools.mixed or not (pools.prefill is None and pools.decode is None)
    counts = PoolCounts(pools.prefill, pools.decode, pools.mixed) if said else None
    settings = msgspec.to_builtins(config.worker)
    worker = {key: settings[key] for key in tree.get("worker", {})}
    return UpdateBody(worker=worker or None, pools=counts, model_name=config.gateway.model_name)


def _follow(
    client: AdminClient, output: Output, answer: PoolsAnswer, name: str, *, wait: bool
) -> None:
    """Prints the steps until the pools are settled.

    Raises AdminError if the version was removed by then.
    """

    def check(seen: PoolsAnswer) -> None:
        if all(version.name != name for version in seen.versions):
            raise AdminError(f"{name} was given up; the version before it serves all requests")

    follow(client, output, answer, wait=wait, check=check)


def _shares(text: str) -> list[int]:
    """Parses shares of requests: numbers separated by commas. Raises ConfigError."""
    try:
        return [int(each) for each in text.split(",") if each.strip()]
    except ValueError as error:
        raise ConfigError(f"--canary is a list like 5,25,50, not {text!r}") from error


def _counts(prefill: int | None, decode: int | None, mixed: int | None) -> PoolCounts | None:
    if prefill is None and decode is None and mixed is None:
        return None
    return PoolCounts(prefill, decode, mixed)
