"""Every public bug report has a test that exists, or a reason why it cannot have one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMBERS = (
    5,
    7,
    9,
    12,
    14,
    15,
    17,
    18,
    21,
    22,
    23,
    24,
    27,
    29,
    32,
    *range(35, 40),
    42,
    45,
    46,
    48,
    50,
    51,
    53,
    54,
    58,
    60,
)
CASES = [f"C{number:02d}" for number in NUMBERS]


def table() -> dict[str, str]:
    """Case -> its cell of tests."""
    rows = re.findall(r"^\| (C\d+) \| [^|]+ \| ([^|]+) \|$", (TESTS / "cases.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_every_case_is_in_the_table_once_and_in_order() -> None:
    assert list(table()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_tests_that_exist_or_a_reason(case: str) -> None:
    cell = table()[case]
    names = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert names or cell.startswith("Not applicable: ")
    for file, name in names:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_every_test_that_is_named_after_a_case_is_in_the_table() -> None:
    cells = table()
    for file in TESTS.glob("*/test_*.py"):
        for name, case in re.findall(r"^def (test_(c\d\d)_\w+)", file.read_text("utf-8"), re.MULTILINE):
            assert f"`{file.relative_to(TESTS).as_posix()}::{name}`" in cells[case.upper()]
