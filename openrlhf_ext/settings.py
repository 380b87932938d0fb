"""From a command line and config files to one `Settings`: defaults < config file and its bases < command line.

OpenRLHF's flags are read by the argument parser that is passed in, so this module needs nothing of OpenRLHF.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from openrlhf_ext.config import ExtConfig
from openrlhf_ext.config_file import RawConfig, assign, dump_yaml, load_config
from openrlhf_ext.config_loading import CommandLineValue, expected, flags, from_dict, nearest, to_dict

_LOCAL_SUFFIXES = (".py", ".json", ".jsonl", ".csv", ".parquet", ".arrow")
_SECRETS = ("logger.wandb.key",)
_DATASETS = ("data.prompt_dataset", "eval.dataset")
_FILES = ("train.agent_func_path", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
_FOLDERS = {"ckpt.path": "checkpoints", "ckpt.output_dir": "model"}
_MODELS = ("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a run; paths are absolute."""

    upstream: SimpleNamespace
    """OpenRLHF's arguments, nested as its code reads them."""
    ext: ExtConfig
    flat: Mapping[str, object]
    """OpenRLHF's arguments by dotted flag name, before its own checks complete them."""
    changed: Mapping[str, object]
    """The part of `flat` that differs from OpenRLHF's defaults."""


def resolve(
    config_file: str | None,
    argv: list[str],
    parser: argparse.ArgumentParser,
    nest: Callable[[dict[str, object]], SimpleNamespace],
) -> Settings:
    """Settings from a config file (optional) and the command line without our own options.

    Args:
        parser: OpenRLHF's parser; its defaults are replaced by what the config file says.
        nest: turns flat dotted flags into the nested namespace.

    Raises:
        ValueError: anything unknown or of a wrong type, with the file and line or the flag, and the way out.
    """
    raw = load_config(config_file) if config_file else RawConfig({}, {}, {})
    ours, theirs = _split(argv)
    for key, words in ours.items():
        assign(raw.ext, key.removeprefix("ext."), CommandLineValue(tuple(words)))
        raw.origins.pop(key, None)
    ext = from_dict(ExtConfig, raw.ext, origins=raw.origins)
    ext = replace(ext, run_dir=_absolute(ext.run_dir))
    defaults = vars(parser.parse_args([]))
    flat = _parsed(theirs, parser, {**defaults, **_from_file(raw, parser)})
    _resolve_paths(flat, defaults, ext)
    changed = {key: value for key, value in flat.items() if value != defaults[key]}
    return Settings(nest(copy.deepcopy(flat)), ext, flat, changed)


def dump_settings(settings: Settings) -> str:
    """YAML of everything that differs from OpenRLHF's defaults and all of ``ext``; loadable as ``--config``.

    Secrets are left out and named in a comment. So are the folders under the run directory: with another
    ``--ext.run_dir`` the file means that one's.
    """
    left_out = {*_SECRETS, *(key for key, path in run_dir_folders(settings.ext).items() if settings.flat[key] == path)}
    shown = {key: _plain(value) for key, value in settings.changed.items() if key not in left_out}
    hidden = [f"# {key}: set, not shown\n" for key in _SECRETS if key in settings.changed]
    return "".join(hidden) + dump_yaml({**shown, "ext": to_dict(settings.ext)})


def run_dir_folders(ext: ExtConfig) -> dict[str, str]:
    """Where checkpoints and the model go unless told otherwise, by flag."""
    return {key: str(Path(ext.run_dir) / folder) for key, folder in _FOLDERS.items()}


def refuse(message: str) -> NoReturn:
    """In place of a parser's `error`: the message alone, without the usage of every flag."""
    raise ValueError(message)


def looks_local(name: str) -> bool:
    """Whether a model, data set or reward function is meant as a path here, not as a name on a hub or a URL."""
    path = name.partition("@")[0]
    is_file = Path(path).suffix in _LOCAL_SUFFIXES
    return "://" not in name and (is_file or re.match(r"[./~]|[^/]+/[^/]*/", path) is not None)


def help_text() -> str:
    """Our own flags by part, with unit, default and the source of the default."""
    lines = [
        "usage: python -m openrlhf_ext.cli.train_ppo_ray [--config FILE] [--ext.<part>.<name> VALUE ...]",
        "                                                [any flag of openrlhf.cli.train_ppo_ray ...]",
        "",
        "  --config FILE      YAML file of OpenRLHF's flags and an `ext:` mapping; `base:` names a file it builds on",
        "  --print-config     print the resolved settings as YAML, without checking them, and exit",
        "  --help-upstream    print OpenRLHF's flags and exit",
    ]
    part = None
    for flag in flags(ExtConfig):
        if flag.key.rpartition(".")[0] != part:
            part = flag.key.rpartition(".")[0]
            lines += ["", f"{part}:" if part != "ext" else "the run:"]
        unit, source = flag.metadata["unit"], flag.metadata["source"]
        default = "required" if flag.default is MISSING else f"default {_shown(flag.default)}"
        lines.append(f"  --{flag.key}  {expected(flag.hint)}{f' [{unit}]' if unit else ''}")
        lines.append(f"      {flag.metadata['help']} ({default}{f'; {source}' if source else ''})")
    lines += ["", "A part that is off is switched on by any of its flags, and off by `null` (--ext.dapo null)."]
    return "\n".join([*lines, "All flags of OpenRLHF 0.11.2 are accepted unchanged: see --help-upstream."])


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _split(argv: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Our ``--ext.*`` flags with the words after each, and the remaining words. The last of a repeated flag counts."""
    ours: dict[str, list[str]] = {}
    theirs: list[str] = []
    target = theirs
    for word in argv:
        if word.startswith("--ext."):
            key, equals, value = word[2:].partition("=")
            ours.pop(key, None)
            target = ours[key] = [value] if equals else []
        elif word.startswith("--"):
            target = theirs
            theirs.append(word)
        else:
            target.append(word)
    return ours, theirs


def _parsed(argv: list[str], parser: argparse.ArgumentParser, defaults: dict[str, object]) -> dict[str, object]:
    """`defaults` overridden by `argv`. Raises ValueError with the parser's message, or with the nearest flag."""
    parser.error = refuse  # type: ignore[method-assign]
    namespace, unknown = parser.parse_known_args(argv, argparse.Namespace(**defaults))
    for word in unknown:
        if not word.startswith("--"):
            raise ValueError(f"unexpected word {word!r} on the command line; every setting is a `--flag value`")
        name = word[2:].partition("=")[0]
        raise ValueError(f"unknown flag --{name}{nearest(name, _valid_names(parser))}; see --help and --help-upstream")
    return vars(namespace)


def _valid_names(parser: argparse.ArgumentParser) -> list[str]:
    ours = [flag.key for flag in flags(ExtConfig)]
    return ["config", "print-config", *ours, *(name[2:] for name in parser._option_string_actions if name[:2] == "--")]


def _from_file(raw: RawConfig, parser: argparse.ArgumentParser) -> dict[str, object]:
    """The dests that the config file sets, checked against the parser's flags."""
    values: dict[str, object] = {}
    for key, value in raw.upstream.items():
        action = parser._option_string_actions.get(f"--{key}")
        if action is None or isinstance(action, argparse._HelpAction):
            hint = nearest(key, _valid_names(parser))
            raise ValueError(f"{raw.origins[key]}: unknown key {key}{hint}; see --help and --help-upstream")
        try:
            values[action.dest] = _for_action(action, value)
        except TypeError as error:
            raise ValueError(f"{raw.origins[key]}: --{key} must be {error}, got {value!r}") from None
    return values


def _for_action(action: argparse.Action, value: object) -> object:
    """`value` as the flag of `action` would give it. Raises TypeError saying what the flag wants."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError("true or false")
        return value if action.const else not value
    if value is None and action.default is None:
        return None
    if action.nargs is None:
        return _scalar(action, value)
    values = value if isinstance(value, list) else [value]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise TypeError(f"a list of {action.nargs} values")
    if action.nargs == "+" and not values:
        raise TypeError("a list of at least one value")
    return [_scalar(action, item) for item in values]


def _scalar(action: argparse.Action, value: object) -> object:
    kind = action.type or str
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        quoted = "a string (in quotes)" if isinstance(value, int | float) else "a string"
        raise TypeError({int: "an integer", float: "a number"}.get(kind, quoted))  # type: ignore[call-overload]
    if action.choices is not None and value not in action.choices:
        raise TypeError("one of " + ", ".join(map(str, action.choices)))
    return value


def _resolve_paths(flat: dict[str, object], defaults: Mapping[str, object], ext: ExtConfig) -> None:
    """Makes paths absolute, and puts checkpoints and the model under the run directory unless told otherwise."""
    for key, folder in run_dir_folders(ext).items():
        if flat[key] == defaults[key]:
            flat[key] = folder
    for key in _FILES:
        if flat[key]:
            flat[key] = _absolute(str(flat[key]))
    for key in (*_DATASETS, *_MODELS, "reward.remote_url"):
        if flat[key]:
            flat[key] = ",".join(_absolute_if_local(item.strip()) for item in str(flat[key]).split(","))


def _absolute_if_local(name: str) -> str:
    path, at, folder = name.partition("@")
    return _absolute(path) + at + folder if looks_local(name) or Path(path).exists() else name


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
