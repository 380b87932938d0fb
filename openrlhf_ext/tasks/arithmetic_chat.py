"""Countdown with three numbers and sums of two-digit numbers as chats, for a small instruction-tuned model.

A row's input is a list of chat messages, so that prompts go through the model's chat template; the answer is an
expression (Countdown, with the label of `countdown.py`) or a whole number (sums), and nothing else.
"""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.tasks.countdown import Grade, Puzzle, grade, parse_label
from openrlhf_ext.tasks.countdown_data import draw_puzzle
from openrlhf_ext.tasks.jsonl import write_jsonl

COUNTDOWN, SUMS = "countdown-3", "sums-2"
TASKS = (COUNTDOWN, SUMS)
"""Datasources."""

_SYSTEM = {COUNTDOWN: "Use each number once.", SUMS: "Calculate."}
"""Short, and given, so that no chat template adds a longer one of its own."""

_HELD_OUT_EVERY = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One chat and what is right; `answer` is one right response, for supervised training."""

    datasource: str
    question: str
    answer: str
    label: str
    key: str
    """Equal for problems that are the same one."""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": _SYSTEM[self.datasource]},
            {"role": "user", "content": self.question},
        ]

    @property
    def is_held_out(self) -> bool:
        """Whether it belongs to evaluation: a fixed fifth of all problems, so no training set of any seed has it."""
        return zlib.crc32(self.key.encode()) % _HELD_OUT_EVERY == 0


def draw_problem(rng: random.Random, datasource: str, held_out: bool) -> Problem:
    """A random problem, held out or not as asked."""
    draw = {COUNTDOWN: _draw_countdown, SUMS: _draw_sum}[datasource]
    while True:
        problem = draw(rng)
        if problem.is_held_out == held_out:
            return problem


def generate_problems(count: int, seed: int, held_out: bool, tasks: Sequence[str] = TASKS) -> list[Problem]:
    """`count` distinct problems in random order, equally many of each of `tasks` (the last one takes the rounding).

    Raises:
        ValueError: there are not that many.
    """
    rng = random.Random(seed)
    problems: dict[str, Problem] = {}
    for position, datasource in enumerate(tasks, start=1):
        goal, misses = count * position // len(tasks), 0
        while len(problems) < goal:
            problem = draw_problem(rng, datasource, held_out)
            misses = misses + 1 if problem.key in problems else 0
            problems[problem.key] = problem
            if misses > 2000:
                raise ValueError(f"There are too few {datasource} problems for {count} in all; ask for fewer.")
    return rng.sample(list(problems.values()), count)


def grade_response(response: str, label: str) -> Grade:
    """Grade a response to either task.

    Raises:
        ValueError: a label that `write_dataset` did not write.
    """
    fields = _fields(label)
    if "sum" in fields:
        text = response.strip()
        is_number = text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 10
        return Grade(accuracy=float(is_number and int(text) == fields["sum"]), format=float(is_number))
    puzzle = parse_label(label)
    return grade(response, puzzle.numbers, puzzle.target)


def write_dataset(out_dir: Path, train: int, eval: int, seed: int, tasks: Sequence[str] = TASKS) -> bool:
    """Write `train.jsonl` and `eval.jsonl`; returns False when both were already there with the same content."""
    changed = [
        write_jsonl(out_dir / f"{split}.jsonl", _rows(generate_problems(count, seed, split == "eval", tasks), split))
        for split, count in (("train", train), ("eval", eval))
    ]
    return any(changed)


def _rows(problems: Sequence[Problem], split: str) -> Iterator[dict[str, object]]:
    for index, problem in enumerate(problems):
        row_id = f"{problem.datasource}-{split}-{index:05d}"
        yield {"id": row_id, "input": problem.messages, "label": problem.label, "datasource": problem.datasource}


def _draw_countdown(rng: random.Random) -> Problem:
    puzzle: Puzzle = draw_puzzle(rng, COUNTDOWN)
    question = f"{', '.join(map(str, puzzle.numbers))} to {puzzle.target}"
    return Problem(COUNTDOWN, question, puzzle.solution, puzzle.label, repr(puzzle.key))


def _draw_sum(rng: random.Random) -> Problem:
    """Two numbers from 10 to 99, added or subtracted, as in reasoning-gym's chain_sum."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    question, result = rng.choice(((f"{a} + {b}", a + b), (f"{a} - {b}", a - b)))
    return Problem(SUMS, question, str(result), json.dumps({"sum": result}), question)


def _fields(label: str) -> dict[str, object]:
    try:
        fields = json.loads(label)
    except (TypeError, ValueError):
        fields = None
    if not isinstance(fields, dict) or ("sum" in fields and type(fields["sum"]) is not int):
        raise ValueError(
            f"The label {label!r} is neither a Countdown puzzle nor a sum. Point data.label_key at the label column, "
            "or rebuild the data with scripts/prepare_data.py arithmetic_chat."
        )
    return fields
