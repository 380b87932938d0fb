"""Countdown with three or four numbers for a language model: the task in words, the expression in `<answer>` tags."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from openrlhf_ext.tasks.countdown import Grade, Puzzle, grade
from openrlhf_ext.tasks.jsonl import write_jsonl
from openrlhf_ext.tasks.sources import read_rows

SOURCE = "Jiayi-Pan/Countdown-Tasks-3to4"
"""TinyZero's puzzles (columns nums, target)."""

_NEED = "it is TinyZero's 490,000 puzzles; "
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PROMPT = (
    "Make {target} out of the numbers {numbers}. Use each of them exactly once, with +, -, *, / and parentheses. "
    "Think it through first. Then write the expression, without an equals sign, between <answer> and </answer>, "
    "such as <answer>(8 - 2) * 3</answer>."
)


def prompt_of(puzzle: Puzzle) -> str:
    return _PROMPT.format(target=puzzle.target, numbers=", ".join(map(str, puzzle.numbers)))


def grade_response(response: str, numbers: Sequence[int], target: int) -> Grade:
    """Grade the last answer; its `format` is 1.0 for any answer in tags, right or not (TinyZero's format reward)."""
    answers = _ANSWER.findall(response)
    if not answers:
        return Grade(accuracy=0.0, format=0.0)
    return Grade(accuracy=grade(answers[-1].strip(), numbers, target).accuracy, format=1.0)


def write_dataset(out_dir: Path, sources: Sequence[str], train: int, eval: int, seed: int) -> bool:
    """Write `train.jsonl` and `eval.jsonl`; returns False when both were already there with the same content.

    Evaluation puzzles are of the fifth that is held out for every seed (`Puzzle.is_held_out`).

    Raises:
        ValueError: a source that cannot be had or is none, or too few different puzzles.
    """
    puzzles = list({p.key: p for source in sources for p in _puzzles(source)}.values())
    random.Random(seed).shuffle(puzzles)
    splits = {}
    for split, count in (("train", train), ("eval", eval)):
        chosen = [puzzle for puzzle in puzzles if puzzle.is_held_out == (split == "eval")]
        if len(chosen) < count:
            raise ValueError(f"there are {len(chosen)} different puzzles for --{split} {count}; lower it")
        splits[split] = list(_rows(chosen[:count], split))
    return any([write_jsonl(out_dir / f"{split}.jsonl", rows) for split, rows in splits.items()])


def _puzzles(source: str) -> Iterator[Puzzle]:
    for number, row in enumerate(read_rows(source, ["nums", "target"], _NEED), start=1):
        numbers, target = row.get("nums"), row.get("target")
        if not (isinstance(numbers, list) and numbers and all(type(n) is int for n in [*numbers, target])):
            raise ValueError(
                f"{source}, row {number} is no puzzle: it needs the columns `nums` (a list of whole numbers) and "
                f"`target` (one), and has {numbers!r} and {target!r}"
            )
        yield Puzzle(tuple(numbers), target, f"countdown-{len(numbers)}")


def _rows(puzzles: Sequence[Puzzle], split: str) -> Iterator[dict[str, str]]:
    for index, puzzle in enumerate(puzzles):
        row_id = f"countdown-words-{split}-{index:06d}"
        yield {"id": row_id, "input": prompt_of(puzzle), "label": puzzle.label, "datasource": puzzle.datasource}
