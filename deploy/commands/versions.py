"""Commands for versions of the model: `baton update`, `baton versions` and its subcommands."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.schema import PoolCounts, PoolsAnswer, UpdateBody, VersionInfo
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
)
from deploy.commands.views import show, table_of
from deploy.ray.config import load_up_config, read_yaml
from engine.config import Config, load_config, read_toml
from engine.control import SERVING_ROLES

WEIGHTS = "VERSION=WEIGHT"

update_app = typer.Typer()  # its commands stand at the top level
versions_app = typer.Typer(help="Versions of the model that are served side by side.")
update_app.add_typer(versions_app, name="versions")


@operates(update_app.command("update"))
def update_command(  # noqa: PLR0913 - a command's options
    client: AdminClient,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="TOML file or baton.yaml: `worker`, pools and model name count"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="directory, hf://, s3:// or gs://")] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the version (default: the next of v1, v2, …)")
    ] = (None),
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
    *,
    wait: Wait = True,
) -> None:
    """Serves another model, or the same one with another configuration, without a pause.

    Workers of the new version start beside the running ones and take new requests as they become
    ready. If the new version does not start, nothing changes.
    """
    body = UpdateBody() if config is None else read_update(config)
    counts = _counts(prefill, decode, mixed) or body.pools
    body = msgspec.structs.replace(
        body,
        name=name,
        model=_absolute(model or body.model),
        model_name=model_name or body.model_name,
        pools=counts,
        weight=weight,
    )
    answer = client.update(body)
    _follow(client, answer, answer.versions[-1].name, wait=wait)


@operates(versions_app.callback(invoke_without_command=True))
def versions_command(client: AdminClient, *, watch: Watch = False) -> None:
    """Shows the versions."""
    show(lambda: versions_table(client.pools()), watch=watch)


@operates(versions_app.command("weight"))
def weight_command(
    client: AdminClient, weights: Annotated[list[str], typer.Argument(metavar=f"{WEIGHTS}...")]
) -> None:
    """Shares new requests by weight: `baton versions weight v1=90 v2=10`."""
    follow(client, client.set_weights(parse_numbers(weights, WEIGHTS)), wait=False)


@operates(versions_app.command("finish"))
def finish_command(
    client: AdminClient,
    version: VersionName,
    prefill: Prefill = None,
    decode: Decode = None,
    mixed: Mixed = None,
    *,
    wait: Wait = True,
) -> None:
    """Lets a version take over from all others, worker by worker."""
    answer = client.finish(version, _counts(prefill, decode, mixed))
    _follow(client, answer, version, wait=wait)


@operates(versions_app.command("abort"))
def abort_command(client: AdminClient, version: VersionName, *, wait: Wait = True) -> None:
    """Gives all new requests to the current version. This one ends after its last request."""
    follow(client, client.abort(version), wait=wait)


def read_update(path: Path) -> UpdateBody:
    """Reads what a configuration file says of a version: worker settings, pools, model, name.

    Fields that the file leaves out stay None. The rest of the file belongs to the deployment and is
    ignored. Raises ConfigError.
    """
    if path.suffix in (".yaml", ".yml"):
        up, tree = load_up_config(path), read_yaml(path)
        model = up.model if "model" in tree else None
        return msgspec.structs.replace(_body_of(up.config, tree), model=model)
    return _body_of(load_config(path, {}, {}), read_toml(path))


def _body_of(config: Config, tree: Mapping[str, Any]) -> UpdateBody:
    """`tree` is the parsed file that `config` was made from."""
    pools = config.pools
    said = pools.mixed or not (pools.prefill is None and pools.decode is None)
    counts = PoolCounts(pools.prefill, pools.decode, pools.mixed) if said else None
    settings = msgspec.to_builtins(config.worker)
    worker = {key: settings[key] for key in tree.get("worker", {})}
    return UpdateBody(worker=worker or None, pools=counts, model_name=config.gateway.model_name)


def versions_table(answer: PoolsAnswer) -> Table:
    """Returns a row for each version: state, model, workers there and wanted, weight."""
    title = "versions"
    if answer.taking_over is not None:
        title += f": {answer.taking_over} takes over"
    texts = ("version", "state", "fingerprint", "model", "workers")
    numbers, wraps = ("weight", "requests"), ("state", "model", "workers")
    table = table_of(title, texts, numbers, wraps=wraps)
    for each in answer.versions:
        workers = ", ".join(
            f"{each.serving.of(role)}/{each.wanted.of(role)} {role}"
            for role in SERVING_ROLES
            if each.serving.of(role) or each.wanted.of(role)
        )
        table.add_row(
            f"[bold]{escape(each.name)}[/bold]" if each.is_current else escape(each.name),
            _state(each),
            each.fingerprint,
            escape(f"{each.model_name} ({each.model})"),
            workers,
            str(each.weight),
            str(each.num_requests),
        )
    return table


def _state(version: VersionInfo) -> str:
    if version.is_leaving:
        return "leaving"
    if version.missing is not None:
        return f"[red]{escape(version.missing)}[/red]"
    return "serving" if version.serving.total else "starting"


def _follow(client: AdminClient, answer: PoolsAnswer, name: str, *, wait: bool) -> None:
    """Follows the steps. Raises AdminError if the version is gone at the end."""

    def check(seen: PoolsAnswer) -> None:
        if all(version.name != name for version in seen.versions):
            raise AdminError(f"{name} was given up; the version before it serves all requests")

    follow(client, answer, wait=wait, check=check)


def _counts(prefill: int | None, decode: int | None, mixed: int | None) -> PoolCounts | None:
    if prefill is None and decode is None and mixed is None:
        return None
    return PoolCounts(prefill, decode, mixed)


def _absolute(model: str | None) -> str | None:
    """Makes a local directory absolute: other processes have other working directories."""
    if model is not None and Path(model).is_dir():
        return str(Path(model).resolve())
    return model
