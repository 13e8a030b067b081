"""The reference of the configuration: every key with its type, default and meaning. Pure.

Its only source is `engine.config`: the types and defaults of the fields, and the fields' comments.
The meaning of a key is the comment on the lines above it, then the comment at the end of its line.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from engine.config import ENVIRONMENT_PREFIX, UNSET, Config, ModelConfig, WorkerConfig

ANY_NAME = "NAME"
SECRETS = ("admin.key", "gateway.api_key")
_FIELD = re.compile(r"    (?P<name>[a-z]\w*): [^#]*(?:  # (?P<says>.*))?")
_VALUE = re.compile(r"    [A-Z]\w* = \"(?P<name>[^\"]+)\"(?:  # (?P<says>.*))?")
_NONE = re.compile(r"\bNone:")
_COMMENT = "    # "
_TYPES: dict[type, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}


class ConfigKey(msgspec.Struct, frozen=True):
    """One key of the configuration."""

    name: str  # full path of the key, with its section
    type: str  # the key's type, in words
    default: str  # the key's default in TOML's syntax; may be UNSET
    meaning: str
    # the values of an enumeration with their meanings, which may be empty texts
    values: dict[str, str]

    @property
    def variable(self) -> str:
        """The name of the environment variable that sets the key."""
        return ENVIRONMENT_PREFIX + self.name.upper().replace(".", "__")


@cache
def config_keys() -> tuple[ConfigKey, ...]:
    """Returns all keys, in the order of the code of `engine.config`."""
    return tuple(key for section, kind in _sections().items() for key in _keys_of(section, kind))


def _sections() -> dict[str, type[msgspec.Struct]]:
    """Returns the type of each section. NAME stands for a name that the operator chooses."""
    found: dict[str, type[msgspec.Struct]] = {}
    for section, kind in get_type_hints(Config).items():
        free = get_args(kind)
        found[f"{section}.{ANY_NAME}" if free else section] = free[1] if free else kind
    return found


def reference_text() -> str:
    """Returns the reference as a page of Markdown."""
    parts = [_HEAD]
    for section, kind in _sections().items():
        parts.append(f"## `[{section}]`\n\n{inspect.getdoc(kind)}\n")
        parts.append("| Key | Type | Default | Meaning |\n|---|---|---|---|")
        parts += [_row(key) for key in config_keys() if key.name.startswith(f"{section}.")]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def settings_of(config: Config) -> Iterator[tuple[ConfigKey, str, bool]]:
    """Yields each key, its value in TOML's syntax, and True if the value is the key's default.

    Values of secret keys are hidden.
    """
    defaults = Config()
    for key in config_keys():
        section, name = key.name.rsplit(".", 1)
        if section.endswith(ANY_NAME):
            continue
        value = getattr(getattr(config, section), name)
        is_default = value == getattr(getattr(defaults, section), name)
        hidden = key.name in SECRETS and not is_default
        yield key, '"(hidden)"' if hidden else toml_of(value), is_default
    for chosen, model in config.models.items():
        yield from _settings_of_model(chosen, model, config.worker)


def _settings_of_model(
    chosen: str, model: ModelConfig, worker: WorkerConfig
) -> Iterator[tuple[ConfigKey, str, bool]]:
    """Yields the settings of a model, and the worker settings that differ for this model."""
    keys = {key.name: key for key in config_keys()}
    for field in msgspec.structs.fields(ModelConfig):
        if field.name == "worker":
            continue
        key = keys[f"models.{ANY_NAME}.{field.name}"]
        value = getattr(model, field.name)
        named = msgspec.structs.replace(key, name=f"models.{chosen}.{field.name}")
        yield named, toml_of(value), value == field.default
    for field in msgspec.structs.fields(WorkerConfig):
        value = getattr(model.worker, field.name)
        if value != getattr(worker, field.name):
            name = f"models.{chosen}.worker.{field.name}"
            named = msgspec.structs.replace(keys[f"worker.{field.name}"], name=name)
            yield named, toml_of(value), False


def toml_of(value: Any) -> str:
    """Returns a value in TOML's syntax. TOML has no null, so None becomes the text that unsets a
    key.
    """
    if value is None:
        return f'"{UNSET}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(toml_of(each) for each in value)}]"
    return msgspec.json.encode(value).decode()  # TOML's texts and numbers include all of JSON's


_HEAD = """# Configuration

Every key, from `engine/config.py`; `baton config reference` prints this page. A key is set in a
TOML file (`baton serve --config FILE`), in `baton.yaml`, or by an environment variable: `BATON_`,
the section, two underscores and the key, as in `BATON_WORKER__KV_MIB=512`. Variables count more
than the file, and flags more than both. They do not count for `baton.yaml`. `baton config show`
prints what is in force, and `baton config check` finds wrong keys and says which are near.

**Off.** Where the type says *or none*, the text `"none"` unsets the key, in files and in variables:
`step_timeout_s = "none"`. YAML's `null` does the same. The meaning says what then holds. An empty
text, `0` and `false` unset nothing: they are values or errors. A key that is left out has its
default.
"""


def _keys_of(section: str, kind: type[msgspec.Struct]) -> Iterator[ConfigKey]:
    meanings, types = _meanings(kind, _FIELD), get_type_hints(kind)
    for field in msgspec.structs.fields(kind):
        enum = next((each for each in _parts(types[field.name]) if issubclass(each, Enum)), None)
        values = {} if enum is None else _meanings(enum, _VALUE)
        default = _default_of(field)
        name = f"{section}.{field.name}"
        yield ConfigKey(name, _words(types[field.name]), default, meanings[field.name], values)


def _default_of(field: msgspec.structs.FieldInfo) -> str:
    """Returns a default in TOML's syntax; an empty text for a key that must be set."""
    if isinstance(field.default, msgspec.Struct):
        return "{}"
    return "" if field.default is msgspec.NODEFAULT else toml_of(field.default)


def _row(key: ConfigKey) -> str:
    name = key.name.rpartition(".")[2]
    default = f"`{key.default}`" if key.default else "must be set"
    meaning = " ".join(filter(None, (key.meaning, _values_text(key.values))))
    cells = (f"`{name}`", key.type, default, meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values_text(values: dict[str, str]) -> str:
    return " ".join(f"`{name}`: {says}." if says else f"`{name}`." for name, says in values.items())


def _words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"list of {_words(get_args(kind)[0])}"
    [part] = _parts(kind)
    if issubclass(part, msgspec.Struct):
        return "table"
    words = "choice" if issubclass(part, Enum) else _TYPES[part]
    return f"{words} or none" if NoneType in get_args(kind) else words


def _parts(kind: Any) -> tuple[type, ...]:
    """Returns the member types of a union, without None. For a list, returns its elements'
    types.
    """
    if isinstance(kind, type) and not get_args(kind):
        return () if kind is NoneType else (kind,)
    return tuple(part for each in get_args(kind) if each is not ... for part in _parts(each))


def _meanings(kind: type, line_form: re.Pattern[str]) -> dict[str, str]:
    """Returns the comment on each field or value of a class, turned into sentences."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in _sources(kind.__module__)[kind.__name__].splitlines():
        if line.startswith(_COMMENT):
            above.append(line.removeprefix(_COMMENT))
        elif match := line_form.fullmatch(line):
            end = match["says"] or ""
            found.setdefault(match["name"], _sentences([" ".join(above), end], line_form))
            above = []
        else:
            above = []
    return found


@cache
def _sources(module: str) -> dict[str, str]:
    """Returns the source text of each class of a module, up to the next class."""
    _, *parts = re.split(
        r"^class (\w+)", inspect.getsource(sys.modules[module]), flags=re.MULTILINE
    )
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _sentences(parts: list[str], line_form: re.Pattern[str]) -> str:
    said = [_NONE.sub(f"{UNSET}:", part.rstrip(".")) for part in parts if part]
    if line_form is _VALUE:
        return " ".join(said)
    return " ".join(f"{part[0].upper()}{part[1:]}." for part in said)
