"""Strict loading of the config dataclasses from nested mappings, and the list of flags they stand for.

Nothing is guessed: an unknown key, a value of another type and a missing required field are errors that name the full
key, where it was set, and the way out.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from openrlhf_ext.config import ConfigError

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class CommandLineValue:
    """The words after one ``--ext.*`` flag, still text: only the type of the field says what they mean."""

    words: tuple[str, ...]


class _Mismatch(Exception):
    """A value is not of the annotated type; `_convert`, which knows the key, turns it into a ConfigError."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One leaf setting. `hint` is its type annotation; `default` is dataclasses.MISSING for a required one."""

    key: str
    hint: object
    default: object
    metadata: Mapping[str, str]


def from_dict(
    cls: type[Config], data: Mapping[str, object], path: str = "ext", origins: Mapping[str, str] | None = None
) -> Config:
    """An instance of dataclass `cls` from a nested mapping.

    Args:
        path: dotted name of the mapping, for messages.
        origins: full dotted key -> "file:line", for messages.

    Raises:
        ConfigError: unknown key, wrong type, missing required field, or a value outside its range.
    """
    origins = origins or {}
    hints = typing.get_type_hints(cls)
    for name in data:
        if name not in hints:
            key = f"{path}.{name}"
            names = ", ".join(sorted(hints))
            problem = f"does not exist{nearest(str(name), hints, path + '.')}; valid here: {names}"
            raise ConfigError(key, problem, origins.get(key, ""))
    values = {name: _convert(hints[name], value, f"{path}.{name}", origins) for name, value in data.items()}
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise ConfigError(f"{path}.{field.name}", f"is required: {field.metadata.get('help', '')}")
    try:
        return cls(**values)
    except ConfigError as error:
        where = origins.get(error.key, "")
        raise ConfigError(error.key, error.problem, where) from None


def to_dict(config: object) -> dict[str, object]:
    """Nested plain dict of a config, such that ``from_dict(type(config), to_dict(config)) == config``."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}  # type: ignore


def flags(cls: type, path: str = "ext") -> list[Flag]:
    """Every leaf flag of `cls`, depth first in the order of the fields; those of a part that is off included."""
    hints = typing.get_type_hints(cls)
    found: list[Flag] = []
    for field in dataclasses.fields(cls):
        key, hint = f"{path}.{field.name}", hints[field.name]
        part = part_class(hint)
        if part is not None:
            found += flags(part, key)
        else:
            found.append(Flag(key, hint, field.default, field.metadata))
    return found


def part_class(hint: object) -> type | None:
    """The dataclass of a part's annotation (``DapoConfig`` or ``DapoConfig | None``), None for a leaf."""
    return next((option for option in _options(hint) if dataclasses.is_dataclass(option)), None)


def nearest(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """``" (did you mean --<prefix><valid>?)"`` with the valid name most like `name`, or ``""``."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean --{prefix}{close[0]}?)" if close else ""


def expected(hint: object) -> str:
    """What a value of this annotation is called in a message."""
    nullable = " or null" if type(None) in _options(hint) else ""
    inner = next(option for option in _options(hint) if option is not type(None))
    if typing.get_origin(inner) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(inner))) + nullable
    if typing.get_origin(inner) is tuple:
        return "a list of integers" + nullable
    if dataclasses.is_dataclass(inner):
        return "a mapping" + nullable
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return names[typing.cast(type, inner)] + nullable


def _options(hint: object) -> tuple[object, ...]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return typing.get_args(hint)
    return (hint,)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def _convert(hint: object, value: object, key: str, origins: Mapping[str, str]) -> object:
    shown = " ".join(value.words) if isinstance(value, CommandLineValue) else value
    try:
        if isinstance(value, CommandLineValue):
            value = _from_words(hint, value.words)
        if value is None and type(None) in _options(hint):
            return None
        inner = next(option for option in _options(hint) if option is not type(None))
        if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
            return from_dict(typing.cast(type, inner), value, key, origins)
        return _checked(inner, value)
    except _Mismatch:
        raise ConfigError(key, f"must be {expected(hint)}, got {shown!r}", origins.get(key, "")) from None


def _checked(hint: object, value: object) -> object:
    """`value` if it has exactly the type `hint`; an int passes for a float. Raises _Mismatch."""
    if typing.get_origin(hint) is Literal and value in typing.get_args(hint):
        return value
    if typing.get_origin(hint) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_checked(typing.get_args(hint)[0], item) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    raise _Mismatch


def _from_words(hint: object, words: tuple[str, ...]) -> object:
    """The Python value that the words of one flag stand for. Raises _Mismatch when they stand for none."""
    inner = next(option for option in _options(hint) if option is not type(None))
    if words == ("null",):
        return None
    if typing.get_origin(inner) is tuple:
        return [_parsed(typing.get_args(inner)[0], word) for word in words]
    if len(words) != 1:
        raise _Mismatch
    return _parsed(inner, words[0])


def _parsed(hint: object, word: str) -> object:
    parsers: dict[object, Callable[[str], object]] = {int: int, float: float, bool: {"true": True, "false": False}.get}
    try:
        return parsers[hint](word) if hint in parsers else word
    except ValueError:
        raise _Mismatch from None
