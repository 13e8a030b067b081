"""Options of commands, made from the settings and the dataclasses that the options fill.

`expanded` replaces two kinds of parameters by options. A dataclass parameter becomes one option for
each of its fields that has a `typer.Option`. A parameter of the type `Annotated[Settings, …]`
becomes one option for each of its `SettingOption`s. Types, defaults and meanings of settings come
from `engine.config` alone.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from engine.config import UNSET, Config
from engine.config_reference import ConfigKey, config_keys

Settings = dict[str, Any]  # values of settings by the settings' keys
Build = Callable[[dict[str, Any]], Any]


class SettingOption(NamedTuple):
    """An option that sets one key of the configuration."""

    key: str  # full path of the key, with its section
    name: str = ""  # the option's name; empty: the key's own name, without the section
    kind: Any = None  # type as which the option is parsed; None: the setting's own type
    default: Any = None  # None: if the option is absent, the setting keeps its value
    more: Mapping[str, Any] = {}  # further arguments for `typer.Option`

    @property
    def parameter(self) -> str:
        """The name of the Python parameter for this option."""
        return self.name or self.key.rpartition(".")[2]


def options_of(section: str, *names: str) -> tuple[SettingOption, ...]:
    """Returns one option for each given key of a section. Each option is named like its key."""
    return tuple(SettingOption(f"{section}.{name}") for name in names)


def with_defaults(options: Sequence[SettingOption], **own: Any) -> tuple[SettingOption, ...]:
    """Returns options that always set their key. Defaults come from `own`; a key that `own` lacks
    has the setting's default.
    """
    return tuple(
        each._replace(default=own.get(each.parameter, _value_of(each.key))) for each in options
    )


def _value_of(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(Config(), section), name)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command. Each parameter that stands for several options is replaced by these
    options.
    """
    shown: list[Parameter] = []
    builds: dict[str, tuple[Build, list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        own, build = _options_in(hint)
        if build is not None:
            builds[parameter.name] = build, [each.name for each in own]
        shown += own or [parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint)]

    def run(**given: Any) -> None:
        for name, (build, names) in builds.items():
            given[name] = build({each: given.pop(each) for each in names})
        command(**given)

    run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _options_in(hint: Any) -> tuple[list[Parameter], Build | None]:
    """Returns the options of a parameter, and a function that makes the parameter's value from
    them.
    """
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return list(_fields_of(hint)), lambda given: hint(**given)
    if get_origin(hint) is Annotated and get_args(hint)[0] == Settings:
        settings: tuple[SettingOption, ...] = get_args(hint)[1]
        return [_parameter(each) for each in settings], lambda given: {
            each.key: _absolute(given[each.parameter]) for each in settings
        }
    return [], None


def _fields_of(kind: type) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hints[field.name]) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]
            )


def _parameter(option: SettingOption) -> Parameter:
    section, _, name = option.key.partition(".")
    kind = get_type_hints(get_type_hints(Config)[section])[name]
    [key] = (each for each in config_keys() if each.name == option.key)
    if option.default is not None:
        more = {"help": key.meaning, **option.more}
    else:
        kind, more = (option.kind or kind) | None, {"help": _help_of(key), **option.more}
    return Parameter(
        option.parameter,
        Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[kind, typer.Option(**more)],
    )


def _help_of(key: ConfigKey) -> str:
    """Returns the meaning and the default of a setting, as help text."""
    if key.default == f'"{UNSET}"':
        return re.sub(rf"(?:[;.] )?{UNSET}:", ". Default:", key.meaning)
    return f"{key.meaning} Default: {key.default.strip(chr(34))}."


def _absolute(value: Any) -> Any:
    """Returns a path as its absolute path, in text form; returns other values unchanged."""
    return str(value.expanduser().resolve()) if isinstance(value, Path) else value
