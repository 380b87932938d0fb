"""Countdown: combine the given numbers, each exactly once, into an expression that equals the target.

A prompt is compact, for a character-level model: `"3 9 5 32="` asks for 32 out of 3, 9 and 5, and `"9*3+5"` is right.
Task and reward follow TinyZero (Pan et al., 2025), in a smaller number range.
"""

import ast
import json
import math
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from pathlib import Path

from openrlhf_ext.tasks.jsonl import write_jsonl

FORMAT_REWARD = 0.1
"""Reward of a well-formed expression that misses the target (TinyZero)."""

MAX_RESPONSE_CHARS = 200
"""Longer responses are not parsed: bounds the cost of grading, and the nesting depth the parser may see."""

MAX_TARGET = 99

UNREACHABLE = "countdown-unreachable"
"""Training puzzles that have no solution: groups that are all wrong whatever the policy does."""

_SHAPES = {
    "countdown-2": (2, 25, "+-"),
    "countdown-3": (3, 9, "+-*"),
    "countdown-4": (4, 9, "+-*"),
    UNREACHABLE: (3, 9, ""),
}
"""Datasource -> how many numbers, the largest of them, operators. Two numbers without * are meant to be trivial."""

TRAIN_MIX = {"countdown-2": 0.2, "countdown-3": 0.35, "countdown-4": 0.35, UNREACHABLE: 0.1}
EVAL_MIX = {"countdown-2": 0.2, "countdown-3": 0.45, "countdown-4": 0.35}

_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_HELD_OUT_EVERY = 5
_MAX_MISSES = 2000


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
    """accuracy: 1.0 when the target is hit; format: 1.0 when the expression is well-formed and uses the numbers once."""

    accuracy: float
    format: float

    @property
    def reward(self) -> float:
        return 1.0 if self.accuracy else FORMAT_REWARD * self.format


# --- Grading ---


def grade(response: str, numbers: Sequence[int], target: int) -> Grade:
    """Grade an expression exactly (fractions, no rounding), by walking its syntax tree; nothing is ever executed.

    Allowed: integers, + - * /, parentheses, plain spaces. Not allowed: unary signs, since `-3` would turn a given number
    into another one. Division by zero is well-formed but wrong.
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


# --- Generating ---


def is_solvable(numbers: Sequence[int], target: int) -> bool:
    """Whether some expression over + - * / and parentheses uses each number once and equals `target`.

    Exhaustive, with exact fractions: about 1 ms for three numbers, some 20 ms for four.
    """
    return _reaches([Fraction(n) for n in numbers], Fraction(target))


def _reaches(values: list[Fraction], target: Fraction) -> bool:
    if len(values) == 1:
        return values[0] == target
    for i, j in combinations(range(len(values)), 2):
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        if any(_reaches([*rest, v], target) for v in _combine(values[i], values[j])):
            return True
    return False


def _combine(a: Fraction, b: Fraction) -> set[Fraction]:
    results = {a + b, a - b, b - a, a * b}
    if b:
        results.add(a / b)
    if a:
        results.add(b / a)
    return results


def draw_puzzle(rng: random.Random, datasource: str) -> Puzzle:
    """Draw one puzzle: by writing down a random expression, or, where it must be unreachable, by search."""
    size, largest, operators = _SHAPES[datasource]
    while True:
        numbers = [rng.randint(1, largest) for _ in range(size)]
        if datasource == UNREACHABLE:
            target, solution = rng.randint(1, MAX_TARGET), ""
            accepted = not is_solvable(numbers, target)
        else:
            target, solution = _random_expression(rng, numbers, operators)
            accepted = 1 <= target <= MAX_TARGET
        if accepted:
            return Puzzle(tuple(numbers), target, datasource, solution)


def _random_expression(rng: random.Random, numbers: Sequence[int], operators: str) -> tuple[int, str]:
    """Value and text of the numbers, in random order, joined by random operators."""
    first, *others = rng.sample(numbers, len(numbers))
    terms, text = [first], str(first)
    for number in others:
        operator = rng.choice(operators)
        text += operator + str(number)
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms), text


def generate_puzzles(count: int, seed: int, mix: Mapping[str, float], held_out: bool = False) -> list[Puzzle]:
    """`count` distinct puzzles in random order, in the shares of `mix` (datasource -> share, sum 1).

    Puzzles that differ only in the order of their numbers count as the same. With `held_out` all of them come from the
    held-out fifth of puzzle space, without it none.

    Raises:
        ValueError: the shares do not sum to 1, or there are not that many distinct puzzles of a datasource.
    """
    rng = random.Random(seed)
    puzzles: dict[tuple[tuple[int, ...], int], Puzzle] = {}
    for datasource, quota in _quotas(count, mix).items():
        goal, misses = len(puzzles) + quota, 0
        while len(puzzles) < goal:
            puzzle = draw_puzzle(rng, datasource)
            if puzzle.is_held_out == held_out and puzzle.key not in puzzles:
                puzzles[puzzle.key] = puzzle
                misses = 0
            elif (misses := misses + 1) > _MAX_MISSES:
                found = quota - goal + len(puzzles)
                raise ValueError(
                    f"There are fewer than {quota} distinct {datasource} puzzles (found {found}). "
                    f"Ask for at most {int(found / mix[datasource])} puzzles in all instead of {count}."
                )
    return rng.sample(list(puzzles.values()), count)


def _quotas(count: int, mix: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers that sum to `count`, in the shares of `mix`; the last datasource takes the rounding."""
    if not math.isclose(sum(mix.values()), 1.0):
        raise ValueError(f"The shares of a mix must sum to 1, got {dict(mix)}.")
    *head, last = mix
    quotas = {datasource: round(count * mix[datasource]) for datasource in head}
    return quotas | {last: count - sum(quotas.values())}


# --- Data files ---


def rows(puzzles: Sequence[Puzzle], split: str) -> Iterator[dict[str, str]]:
    """Rows for OpenRLHF's prompt data set (input_key `input`, label_key `label`)."""
    for index, puzzle in enumerate(puzzles):
        row_id = f"countdown-{split}-{index:05d}"
        yield {"id": row_id, "input": puzzle.prompt, "label": puzzle.label, "datasource": puzzle.datasource}


def write_dataset(out_dir: Path, train: int = 2000, eval: int = 200, seed: int = 0) -> bool:
    """Write `train.jsonl` and `eval.jsonl`; returns False when both were already there with the same content.

    The two share no puzzle, and every evaluation puzzle can be solved. The content depends on the arguments only.
    """
    training = generate_puzzles(train, seed, TRAIN_MIX)
    evaluation = generate_puzzles(eval, seed, EVAL_MIX, held_out=True)
    changed = [
        write_jsonl(out_dir / "train.jsonl", rows(training, "train")),
        write_jsonl(out_dir / "eval.jsonl", rows(evaluation, "eval")),
    ]
    return any(changed)
