"""Prompt files of mathematics problems whose answers `rewards/math.py` can grade."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openrlhf_ext.eval_sets import INPUT_KEYS, LABEL_KEYS, MATH_TEMPLATE, PLACEHOLDER
from openrlhf_ext.tasks.jsonl import write_jsonl
from openrlhf_ext.tasks.sources import first_of, read_rows

SETS = {
    "deepscaler": ("agentica-org/DeepScaleR-Preview-Dataset", "about 40,000 problems"),
    "deepmath": ("friendshipkim/DeepMath-103K-filtered", "DeepMath-103K as Pilot-Commit's code filters it"),
    "polaris": ("POLARIS-Project/Polaris-Dataset-53K", "about 53,000 problems"),
    "gsm8k": ("openai/gsm8k@main", "7,473 word problems"),
}
"""Name -> where it is published, and what it is."""


@dataclass(frozen=True, slots=True)
class Problem:
    text: str
    answer: str

    @property
    def key(self) -> str:
        """Equal for problems that differ in spaces and case only."""
        return " ".join(self.text.split()).casefold()


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the rows; `left_out` counts rows by reason."""

    train: int
    eval: int
    left_out: Counter[str] = field(default_factory=Counter)
    is_new: bool = True


def write_dataset(
    out_dir: Path,
    name: str,
    sources: Sequence[str],
    eval_sources: Mapping[str, str],
    *,
    train: int | None,
    held_out: int,
    seed: int,
    template: str = MATH_TEMPLATE,
    system: str | None = None,
) -> Written:
    """Write `train.jsonl` and `eval.jsonl`, both or neither.

    Training problems are drawn by `seed` and share none with the evaluation, which is `eval_sources` (name -> source)
    or, without any, `held_out` problems of the sources themselves. Prompts are plain text for a chat template, or
    chat messages where a `system` message is given.

    Args:
        train: at most this many; None for all.

    Raises:
        ValueError: a source that cannot be had, without usable problems, or with too few.
    """
    left_out: Counter[str] = Counter()
    need = f"it is {SETS[name][1]}; " if name in SETS else ""
    problems = [problem for source in sources for problem in _problems(source, need, left_out)]
    evaluation = {key: list(_distinct(_problems(source, "", Counter()))) for key, source in eval_sources.items()}
    known = {problem.key for chosen in evaluation.values() for problem in chosen}
    pool = []
    for problem in _distinct(problems, left_out):
        if problem.key in known:
            left_out["in the evaluation"] += 1
        else:
            pool.append(problem)
    random.Random(seed).shuffle(pool)
    if not evaluation:
        if len(pool) <= held_out:
            raise ValueError(
                f"there are {len(pool)} usable problems, of which --eval {held_out} leaves none to train on; lower "
                "--eval, or name evaluation sets with --eval-set"
            )
        evaluation, pool = {name: pool[:held_out]}, pool[held_out:]
    training = pool[:train]
    if train is not None and len(training) < train:
        raise ValueError(f"there are {len(training)} problems to train on, fewer than --train {train}; lower it")

    def rows(problems: Iterable[Problem], datasource: str, split: str) -> Iterator[dict[str, object]]:
        for index, problem in enumerate(problems):
            text = template.replace(PLACEHOLDER, problem.text)
            chat = [{"role": "system", "content": system}, {"role": "user", "content": text}]
            yield {
                "id": f"{datasource}-{split}-{index:06d}",
                "input": text if system is None else chat,
                "label": problem.answer,
                "datasource": datasource,
            }

    eval_rows = [row for key, chosen in evaluation.items() for row in rows(chosen, key, "eval")]
    changed = [
        write_jsonl(out_dir / "train.jsonl", rows(training, name, "train")),
        write_jsonl(out_dir / "eval.jsonl", eval_rows),
    ]
    return Written(len(training), len(eval_rows), left_out, any(changed))


def _problems(source: str, need: str, left_out: Counter[str]) -> list[Problem]:
    """The usable problems of a source; those that are not are counted by reason."""
    # Here: the grader needs math-verify, whose absence the caller explains.
    from openrlhf_ext.tasks.math_answers import gold_answer

    rows = read_rows(source, [*INPUT_KEYS, *LABEL_KEYS], need)
    if not rows:
        raise ValueError(f"{source} has no rows; give another file")
    input_key = first_of(INPUT_KEYS, rows[0], source, "the problem")
    label_key = first_of(LABEL_KEYS, rows[0], source, "the answer")
    problems = []
    for row in rows:
        text = row.get(input_key)
        if not isinstance(text, str) or not text.strip():
            left_out["without a problem"] += 1
            continue
        try:
            problems.append(Problem(text.strip(), gold_answer(row.get(label_key))))
        except ValueError:
            left_out["without a short answer"] += 1
    if not problems:
        raise ValueError(
            f"{source}: none of {len(rows)} rows has a problem in {input_key!r} and an answer in {label_key!r}"
        )
    return problems


def _distinct(problems: Iterable[Problem], left_out: Counter[str] | None = None) -> Iterator[Problem]:
    seen: set[str] = set()
    for problem in problems:
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem
        elif left_out is not None:
            left_out["repeated"] += 1
