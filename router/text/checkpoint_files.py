"""Reads the prompt files of a checkpoint: chat templates, and the recommended sampling.

Templates are read in the order in which transformers reads them:

1. `chat_template.jinja` is the template named `default`. Each `NAME.jinja` in
   `additional_chat_templates/` is the template `NAME`. If any of these files exists, the other
   sources are not read.
2. `chat_template` of `tokenizer_config.json`: a text, or texts by name, also as a list.
3. The same field of `processor_config.json` or of `chat_template.json`. In transformers these
   are the templates of a processor. A text server has no processor, so the tokenizer's templates
   have priority.

`generation_config.json` has the sampling and the length that the model's authors recommend. These
values are used for fields that the client has not set, as by vLLM with `--generation-config auto`.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.errors import CheckpointError
from router.text.templates import DEFAULT

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
FIELD = "chat_template"
DEFAULTS_FILE = "generation_config.json"

Config = dict[str, Any]


class _NamedTemplate(msgspec.Struct):
    """An entry of a list of templates: a name and a source."""

    name: str
    template: str


def template_sources(directory: Path, config: Config) -> dict[str, str]:
    """Returns the sources of all templates by name. `config` is `tokenizer_config.json`.

    Raises CheckpointError with the name of the file.
    """
    if found := _of_files(directory):
        return found
    if (asked := config.get(FIELD)) is not None:
        return _sources(asked, directory / "tokenizer_config.json")
    for path in (directory / name for name in PROCESSOR_FILES):
        if path.is_file() and (asked := load_config(path).get(FIELD)) is not None:
            return _sources(asked, path)
    return {}


def load_config(path: Path) -> Config:
    """Reads a JSON file. Raises CheckpointError with the name of the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _of_files(directory: Path) -> dict[str, str]:
    paths = {DEFAULT: directory / TEMPLATE_FILE}
    paths |= {path.stem: path for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    return {name: _read(path) for name, path in paths.items() if path.is_file()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _sources(value: object, path: Path) -> dict[str, str]:
    try:
        match value:
            case str():
                return {DEFAULT: value}
            case list():
                entries = msgspec.convert(value, list[_NamedTemplate])
                return {entry.name: entry.template for entry in entries}
        return msgspec.convert(value, dict[str, str])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {FIELD}: {error}") from error


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The sampling of a request that sets no fields: the values of the file, or else of the API."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


NO_DEFAULTS = SamplingDefaults()


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Returns a checkpoint's defaults. Raises CheckpointError for a value that is not allowed."""
    path = directory / DEFAULTS_FILE
    if not path.is_file():
        return NO_DEFAULTS
    try:
        given = msgspec.json.decode(path.read_bytes(), type=Config)
        return msgspec.convert({n: v for n, v in given.items() if v is not None}, SamplingDefaults)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}; --generation-config none ignores it") from error
