"""Reads the declaration of a deployment: a TOML file of `baton serve`, or baton.yaml."""

from pathlib import Path

import msgspec

from deploy.admin.schema import Declaration
from deploy.base.cluster_config import load_up_config, read_yaml
from engine.config import Config, load_config, read_toml


def read_declaration(path: Path) -> Declaration:
    """Returns the settings in the file. Environment variables are ignored.

    Raises ConfigError.
    """
    model: str | None = None
    if path.suffix in (".yaml", ".yml"):
        up, tree = load_up_config(path), read_yaml(path)
        config, model = up.config, up.model if "model" in tree else None
    else:
        config, tree = load_config(path, {}, {}), read_toml(path)
    values = msgspec.to_builtins(config)
    sections = [name for name in Config.__struct_fields__ if tree.get(name)]
    settings = {name: {key: values[name][key] for key in tree[name]} for name in sections}
    return Declaration(absolute(model), settings)


def absolute(model: str | None) -> str | None:
    """Makes a local directory absolute: other processes have other working directories."""
    if model is not None and Path(model).is_dir():
        return str(Path(model).resolve())
    return model
