"""Countdown, the data: drawing puzzles of known difficulty, and writing prompt files.

The mix is for a policy after a short warm start: easy puzzles that become all right, hard ones that stay all wrong,
some without any solution, and enough in between; so zero-variance groups are common from the first step.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from pathlib import Path

from openrlhf_ext.tasks.countdown import Puzzle
from openrlhf_ext.tasks.jsonl import write_jsonl

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

TRAIN_MIXES = {
    "even": {"countdown-2": 0.2, "countdown-3": 0.35, "countdown-4": 0.35, UNREACHABLE: 0.1},
    "sparse": {"countdown-2": 0.4, "countdown-3": 0.12, "countdown-4": 0.08, UNREACHABLE: 0.4},
}
"""What is trained on. ``sparse`` has few puzzles that a longer warm start leaves between all right and all wrong."""

EVAL_MIX = {"countdown-2": 0.2, "countdown-3": 0.45, "countdown-4": 0.35}

_MAX_MISSES = 2000
"""Draws in a row that give no new puzzle before the puzzles of a datasource count as used up."""


def is_solvable(numbers: Sequence[int], target: int) -> bool:
    """Whether some expression over + - * / and parentheses uses each number once and equals `target`.

    Exhaustive, with exact fractions: well under 1 ms for three numbers, about 10 ms for four.
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


def rows(puzzles: Sequence[Puzzle], split: str) -> Iterator[dict[str, str]]:
    """Rows for OpenRLHF's prompt data set (input_key `input`, label_key `label`)."""
    for index, puzzle in enumerate(puzzles):
        row_id = f"countdown-{split}-{index:05d}"
        yield {"id": row_id, "input": puzzle.prompt, "label": puzzle.label, "datasource": puzzle.datasource}


def write_dataset(out_dir: Path, train: int = 2000, eval: int = 200, seed: int = 0, mix: str = "even") -> bool:
    """Write `train.jsonl` and `eval.jsonl`; returns False when both were already there with the same content.

    The two share no puzzle, and every evaluation puzzle can be solved. The content depends on the arguments only.
    """
    training = generate_puzzles(train, seed, TRAIN_MIXES[mix])
    evaluation = generate_puzzles(eval, seed, EVAL_MIX, held_out=True)
    changed = [
        write_jsonl(out_dir / "train.jsonl", rows(training, "train")),
        write_jsonl(out_dir / "eval.jsonl", rows(evaluation, "eval")),
    ]
    return any(changed)
