"""Countdown, the task: combine the given numbers, each exactly once, into an expression that equals the target.

A prompt is compact, for a character-level model: `"3 9 5 32="` asks for 32 out of 3, 9 and 5, and `"9*3+5"` is right.
The task is TinyZero's (Pan et al., 2025), in a smaller number range. Its reward of 0.1 for a well-formed expression
is left out: it makes groups without a single right answer vary, and so hides which prompts are informative.
"""

import ast
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

MAX_RESPONSE_CHARS = 200
"""Longer responses are not parsed: bounds the cost of grading, and the nesting depth the parser may see."""

_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One puzzle; `solution` is an expression that solves it, empty where there is none or it is not known."""

    numbers: tuple[int, ...]
    target: int
    datasource: str = field(default="", compare=False)
    solution: str = field(default="", compare=False)

    @property
    def prompt(self) -> str:
        return " ".join(map(str, self.numbers)) + f" {self.target}="

    @property
    def label(self) -> str:
        return json.dumps({"numbers": list(self.numbers), "target": self.target})

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Equal for puzzles that differ only in the order of their numbers."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def is_held_out(self) -> bool:
        """Whether the puzzle belongs to evaluation: a fixed fifth of all puzzles, so that no training set and no warm
        start, of whatever seed, ever contains an evaluation puzzle."""
        return zlib.crc32(repr(self.key).encode()) % _HELD_OUT_EVERY == 0


@dataclass(frozen=True, slots=True)
class Grade:
    accuracy: float
    """1.0 when the target is hit, else 0.0."""
    format: float
    """1.0 when the response is a well-formed expression that uses each given number exactly once, else 0.0."""


def grade(response: str, numbers: Sequence[int], target: int) -> Grade:
    """Grade an expression exactly (fractions, no rounding), by walking its syntax tree; nothing is ever executed.

    Allowed: integers, + - * /, parentheses, plain spaces. Not allowed: unary signs, since `-3` would turn a given
    number into another one. Division by zero is well-formed but wrong.
    """
    tree = _parse(response)
    if tree is None or sorted(_integers(tree)) != sorted(numbers):
        return Grade(accuracy=0.0, format=0.0)
    try:
        return Grade(accuracy=float(_value(tree) == target), format=1.0)
    except ZeroDivisionError:
        return Grade(accuracy=0.0, format=1.0)


def parse_label(label: str) -> Puzzle:
    """The puzzle of a row's label, `{"numbers": [3, 9, 5], "target": 32}` as a JSON string.

    Raises:
        ValueError: the label is not such a string.
    """
    try:
        fields = json.loads(label)
        numbers, target = fields["numbers"], fields["target"]
    except (TypeError, ValueError, KeyError):
        numbers, target = None, None
    if not (isinstance(numbers, list) and numbers and all(type(n) is int for n in [*numbers, target])):
        raise ValueError(
            f'Countdown label {label!r} is not a JSON string like {{"numbers": [3, 9, 5], "target": 32}}. '
            "Point data.label_key at the label column, or rebuild the data with scripts/prepare_data.py countdown."
        )
    return Puzzle(numbers=tuple(numbers), target=target)


def _parse(response: str) -> ast.expr | None:
    """The syntax tree of a well-formed expression over the allowed alphabet, or None."""
    if len(response) > MAX_RESPONSE_CHARS or not _ALPHABET.fullmatch(response):
        return None
    try:
        tree = ast.parse(response.strip(" "), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: CPython's limits on nesting
        return None
    return tree if _is_arithmetic(tree) else None


def _is_arithmetic(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        return _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return False


def _integers(tree: ast.expr) -> list[int]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    left, right = _value(node.left), _value(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case _:
            return left / right
