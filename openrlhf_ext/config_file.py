"""YAML config files: OpenRLHF's dotted flags at the top level, our settings under ``ext``, inheritance by ``base``.

    base: grpo.yaml                  # path relative to this file; this file wins key by key
    rollout.batch_size: 16           # OpenRLHF's flag --rollout.batch_size, dotted ...
    train: {batch_size: 128}         # ... or nested
    ext:
      dapo: {max_rounds: 5}          # `dapo: null` switches a part of the base off

Scalars follow YAML 1.2 where PyYAML's 1.1 would surprise: ``1e-3`` is a number, ``off`` and ``no`` are strings,
``010`` is not octal. A key given twice in one file is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class RawConfig:
    """What a chain of config files says, not yet checked against any flag.

    `upstream` is flat, by OpenRLHF's dotted flag names; `ext` is nested; `origins` gives "file:line" for every full
    dotted key (``rollout.batch_size``, ``ext.dapo.max_rounds``).
    """

    upstream: dict[str, object]
    ext: dict[str, object]
    origins: dict[str, str]


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2's reading of plain scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes a string which either YAML 1.1 or `_Loader` would read as something else."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def dump_yaml(config: dict[str, object]) -> str:
    """YAML text that `load_config` reads back as the same values."""
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=4096)


@dataclass(frozen=True, slots=True)
class _File:
    """One file's leaves (dotted key -> value), and the line of every key in it."""

    path: Path
    leaves: dict[str, object] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)


def load_config(path: str | Path) -> RawConfig:
    """Reads a config file and the chain of its bases.

    Raises:
        ValueError: unreadable file, bad YAML, a key given twice, a circular `base`; with file and line.
    """
    config = RawConfig({}, {}, {})
    for file in _chain(Path(path), "--config", ()):
        config.origins.update({key: f"{file.path}:{line}" for key, line in file.lines.items()})
        for key, value in file.leaves.items():
            if key.startswith("ext."):
                assign(config.ext, key.removeprefix("ext."), value)
            elif key == "ext" and value not in (None, {}):
                raise ValueError(f"{config.origins[key]}: ext must be a mapping of parts, got {value!r}")
            elif key != "ext":
                config.upstream[key] = value
    return config


def assign(nested: dict[str, object], key: str, value: object) -> None:
    """Sets the dotted `key`. An empty mapping switches a part on and keeps what is already set in it."""
    *parents, name = key.split(".")
    for parent in parents:
        if not isinstance(nested.get(parent), dict):
            nested[parent] = {}
        nested = nested[parent]  # type: ignore[assignment]
    if value != {} or not isinstance(nested.get(name), dict):
        nested[name] = value


def _chain(path: Path, named_by: str, children: tuple[Path, ...]) -> list[_File]:
    """The files from the root base down to `path`. `named_by` says where `path` comes from, for messages."""
    if path.resolve() in children:
        circle = " -> ".join(child.name for child in (*children, path))
        raise ValueError(f"{named_by}: the `base` files form a circle: {circle}; remove one `base`")
    file = _read(path, named_by)
    base = file.leaves.pop("base", None)
    if base is None:
        return [file]
    where = f"{path}:{file.lines['base']}: base"
    if not isinstance(base, str):
        raise ValueError(f"{where} must be one path, relative to this file, got {base!r}")
    return [*_chain(path.parent / base, where, (*children, path.resolve())), file]


def _read(path: Path, named_by: str) -> _File:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{named_by}: cannot read {path} ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{named_by}: {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{named_by}: {path} has a character that YAML does not allow: {error}") from None
    file = _File(path)
    try:
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            _collect(loader, root, "", file)
        elif root is not None:
            raise ValueError(f"{path}:{root.start_mark.line + 1}: a config file is a mapping of `flag: value` lines")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    finally:
        loader.dispose()
    return file


def _collect(loader: _Loader, node: yaml.MappingNode, prefix: str, file: _File) -> None:
    """Adds what is below `node` to `file` under dotted keys. An empty mapping is a leaf of its own."""
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        name = loader.construct_object(key_node, deep=True)
        if not isinstance(name, str):
            raise ValueError(f"{file.path}:{line}: a key must be a name, got {name!r}; write the flag without dashes")
        key = prefix + name
        if key in file.lines:
            first = file.lines[key]
            raise ValueError(f"{file.path}:{line}: {key} was already set in line {first}; keep one of the two")
        file.lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _collect(loader, value_node, f"{key}.", file)
        else:
            file.leaves[key] = loader.construct_object(value_node, deep=True)
