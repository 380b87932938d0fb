"""Rows of a published data set: a local .jsonl, .json or .parquet file, or a data set of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from openrlhf_ext.tasks.jsonl import parse_line

_SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(source: str, columns: Sequence[str], need: str = "") -> list[dict[str, object]]:
    """All rows, with those of `columns` that the data set has: others may hold gigabytes.

    Args:
        source: a file, or a name on the hub as `OWNER/NAME[@CONFIGURATION][:SPLIT]` (split: train).
        need: what the data set is, for the message when it cannot be had.

    Raises:
        ValueError: it cannot be had or read, with the way out; a bad line with file:line.
    """
    path = Path(source)
    if path.suffix in _SUFFIXES:
        try:
            rows = _read_file(path, columns)
        except OSError as error:
            raise ValueError(f"cannot read {source} ({error.strerror or error}); {need}check the path") from None
    elif path.exists():
        raise ValueError(f"{source} is no {', '.join(_SUFFIXES)} file; give the data set's files themselves")
    else:
        rows = _read_hub(source, columns, need)
    return [{name: row[name] for name in columns if name in row} for row in rows]


def first_of(names: Sequence[str], row: Mapping[str, object], source: str, kind: str) -> str:
    """The first of some columns that a row has. Raises ValueError for none."""
    for name in names:
        if name in row:
            return name
    raise ValueError(f"{source} has no column {' or '.join(names)}, where {kind} would be; rename it in the file")


def _read_file(path: Path, columns: Sequence[str]) -> list[dict[str, object]]:
    if path.suffix == ".parquet":
        # Imported here, as `datasets` below: both take a second, and other tasks need neither.
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            file = ParquetFile(path)
            return file.read([name for name in file.schema_arrow.names if name in columns]).to_pylist()
        except ArrowException as error:
            raise ValueError(f"{path} is no whole parquet file ({error}); copy it again") from None
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); for one object a line call it .jsonl") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path} must hold one list of objects; for one object a line call it .jsonl")
        return rows
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                rows.append(parse_line(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return rows


def _read_hub(source: str, columns: Sequence[str], need: str) -> list[dict[str, object]]:
    name, _, split = source.partition(":")
    name, _, configuration = name.partition("@")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"the data set {name} ({need}the `datasets` package reads it from the hub): pip install datasets, or give "
            "its files with --source"
        ) from None
    try:
        dataset = load_dataset(name, configuration or None, split=split or "train")
        return dataset.select_columns([c for c in dataset.column_names if c in columns]).to_list()
    except Exception as error:  # datasets and its network layers raise many kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the data set {name} cannot be had ({type(error).__name__}: {reason}); {need}on a machine with a network "
            f"run `hf download --repo-type dataset {name} --local-dir FOLDER`, copy FOLDER here, and give its files "
            f"({', '.join(_SUFFIXES)}) with --source"
        ) from None
