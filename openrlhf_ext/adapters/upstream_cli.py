"""OpenRLHF's own argument parser and argument checks, taken from its command line module without importing it.

OpenRLHF builds both under ``if __name__ == "__main__"`` of a module whose imports pull in ray, vllm and deepspeed.
That block is a plain sequence: the parser, ``args = parser.parse_args()``, ``args = hierarchize(args)``, the checks,
and ``train(args)``. Here the pieces between those landmarks are compiled as they stand, so that they are exactly
upstream's and cost milliseconds.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import logging
import sys
from datetime import datetime
from pathlib import Path
from types import CodeType, SimpleNamespace

from openrlhf_ext.adapters.upstream import SUPPORTED, check_version

logger = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """OpenRLHF's parser, without abbreviations. Raises RuntimeError if this OpenRLHF is not the supported one."""
    statements = _main_block()
    namespace: dict[str, object] = {"argparse": argparse, "datetime": datetime}
    exec(_compiled(statements[: _position(statements, "args = parser.parse_args()")]), namespace)
    parser = namespace.get("parser")
    if not isinstance(parser, argparse.ArgumentParser):
        raise _unexpected("its command line has no parser")
    parser.allow_abbrev = False
    return parser


def nest(flat: dict[str, object]) -> SimpleNamespace:
    """The nested namespace that OpenRLHF's code reads, from flags by their dotted names (upstream's hierarchize)."""
    source = _source_folder() / "utils" / "config.py"
    spec = importlib.util.spec_from_file_location("_openrlhf_utils_config", source)
    if spec is None or spec.loader is None or not source.is_file():
        raise _unexpected("it has no utils/config.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hierarchize(argparse.Namespace(**flat))


def validate(args: SimpleNamespace) -> None:
    """Runs OpenRLHF's own checks on nested arguments, which they complete in place; its warnings go to our logger.

    Raises:
        ValueError: with OpenRLHF's message.
    """
    statements = _main_block()
    first = _position(statements, "args = hierarchize(args)") + 1
    last = min(_position(statements, "train(args)"), _position(statements, "if args.use_ms:"))
    try:
        exec(_compiled(statements[first:last]), {"args": args, "print": _warn})
    except (AssertionError, ValueError) as error:
        raise ValueError(f"OpenRLHF refuses these settings: {error}") from None


def _warn(*words: object) -> None:
    logger.warning("OpenRLHF: %s", " ".join(map(str, words)).removeprefix("[Warning] "))


def _source_folder() -> Path:
    try:
        check_version()
        spec = importlib.util.find_spec("openrlhf")
    except importlib.metadata.PackageNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise RuntimeError(f"OpenRLHF is not installed for {sys.executable}; install openrlhf=={SUPPORTED} there")
    return Path(spec.origin).parent


def _unexpected(reason: str) -> RuntimeError:
    return RuntimeError(f"the installed openrlhf is not {SUPPORTED} as released: {reason}; install it anew")


def _main_block() -> list[ast.stmt]:
    source = _source_folder() / "cli" / "train_ppo_ray.py"
    if not source.is_file():
        raise _unexpected("it has no cli/train_ppo_ray.py")
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            return statement.body
    raise _unexpected("cli/train_ppo_ray.py has no main block")


def _position(statements: list[ast.stmt], landmark: str) -> int:
    """Index of the statement whose first line is `landmark`."""
    for index, statement in enumerate(statements):
        if ast.unparse(statement).splitlines()[0] == landmark:
            return index
    raise _unexpected(f"cli/train_ppo_ray.py has no `{landmark}`")


def _compiled(statements: list[ast.stmt]) -> CodeType:
    return compile(ast.Module(statements, type_ignores=[]), "<openrlhf.cli.train_ppo_ray>", "exec")
