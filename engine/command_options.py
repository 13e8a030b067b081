"""Options of commands, made from the settings and the dataclasses that they fill.

A command that is `expanded` has an option for each field of its parameters that are dataclasses, if
the field has a `typer.Option`. It has an option for each `SettingOption` of a parameter of the type
`Annotated[Settings, …]`. A setting has its type, default and meaning from `engine.config` alone.
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

Settings = dict[str, Any]  # values of settings by their keys
Build = Callable[[dict[str, Any]], Any]


class SettingOption(NamedTuple):
    """An option that sets a key of the configuration."""

    key: str  # with its section
    name: str = ""  # of the parameter; empty: the key without its section
    kind: Any = None  # what the option is read as; None: as the setting
    default: Any = None  # None: without the option the setting keeps its value
    more: Mapping[str, Any] = {}  # arguments of `typer.Option`

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self.name or self.key.rpartition(".")[2]


def options_of(section: str, *names: str) -> tuple[SettingOption, ...]:
    """Returns options that have the names of their keys in a section."""
    return tuple(SettingOption(f"{section}.{name}") for name in names)


def with_defaults(options: Sequence[SettingOption], **own: Any) -> tuple[SettingOption, ...]:
    """Returns options that always set their key: to a default of `own`, or to the setting's."""
    return tuple(
        each._replace(default=own.get(each.parameter, _value_of(each.key))) for each in options
    )


def _value_of(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(Config(), section), name)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with options in place of the parameters that hold several of them."""
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
    """Returns the options of a parameter of this type, and what makes its value of theirs."""
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
    """Returns the meaning of a setting, and its default."""
    if key.default == f'"{UNSET}"':
        return re.sub(rf"(?:[;.] )?{UNSET}:", ". Default:", key.meaning)
    return f"{key.meaning} Default: {key.default.strip(chr(34))}."


def _absolute(value: Any) -> Any:
    """Returns the text of an absolute path for a path, and any other value as it is."""
    return str(value.expanduser().resolve()) if isinstance(value, Path) else value
