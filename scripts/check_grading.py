"""Hold the mathematics grader to reference answers: it must accept what is right and refuse what is not.

    python scripts/check_grading.py DATA.jsonl... [--out FILE]

Each row of the files is a case of each of these forms that it can have:

    answer         its answer in a box; must be accepted
    rewritten      the same in another notation: 2n/2 for a whole number n, \\dfrac for \\frac; must be accepted
    solution       its whole reference solution; must be accepted
    near miss      n + 1 for a whole number n; must be refused
    other answer   the answer of another row, drawn at random among those with other text; must be refused, unless the
                   two are equal after all

What was graded otherwise is listed. Grading goes through the reward file in processes that are killed at their
deadline, as in training.
"""

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import openrlhf_ext.rewards
from openrlhf_ext.eval_sets import EvalSet, read_eval_sets
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, check_reward
from openrlhf_ext.tasks.math_answers import gold_answer

REWARD = Path(openrlhf_ext.rewards.__file__).with_name("math.py")
_WHOLE_NUMBER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)")


@dataclass(frozen=True, slots=True)
class Case:
    """One response and whether it is right."""

    line: int
    label: object
    response: str
    is_right: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """A case that was graded wrongly, and how."""

    line: int
    gold: str
    response: str
    why: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", metavar="DATA.jsonl")
    parser.add_argument("--label-key", help="column of the answer (default: found by its name)")
    parser.add_argument("--solution-key", default="solution", help="column of the solution (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of other rows (default %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="grading processes (default %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file of the rates and of all that was graded wrongly")
    args = parser.parse_args(argv)
    try:
        sets = read_eval_sets(args.data, label_key=args.label_key)
        with closing(RewardPool(str(REWARD), 10.0, args.workers)) as pool:
            report = {
                eval_set.name: {
                    form: check(pool, cases, args.workers)
                    for form, cases in forms(eval_set, args.solution_key, args.seed).items()
                }
                for eval_set in sets
            }
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{'set':<16}{'form':<14}{'graded':>8}{'accepted':>10}{'rate':>9}")
    for name, results in report.items():
        for form, (graded, accepted, _) in results.items():
            print(f"{name:<16}{form:<14}{graded:>8}{accepted:>10}{accepted / graded:>9.2%}")
    for name, results in report.items():
        for form, (_, _, misses) in results.items():
            for miss in misses:
                print(f"{name}:{miss.line} {form}: {miss.why}: gold {miss.gold!r}, response {miss.response[-80:]!r}")
    if args.out:
        content = {
            name: {
                form: {"graded": graded, "accepted": accepted, "misses": [asdict(miss) for miss in misses]}
                for form, (graded, accepted, misses) in results.items()
            }
            for name, results in report.items()
        }
        args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def forms(eval_set: EvalSet, solution_key: str, seed: int) -> dict[str, list[Case]]:
    """The cases of each form that the set has."""
    lines = eval_set.path.read_bytes().split(b"\n")
    golds = [gold_answer(row.label) for row in eval_set.rows]
    rng = random.Random(seed)
    right, wrong = ("answer", "rewritten", "solution"), ("near miss", "other answer")
    cases: dict[str, list[Case]] = {form: [] for form in (*right, *wrong)}
    for row, gold in zip(eval_set.rows, golds, strict=True):
        # GSM8K has its answer at the end of the solution, in one column.
        whole = row.label if str(row.label).strip() != gold else None
        responses = {"answer": box(gold), "solution": json.loads(lines[row.line - 1]).get(solution_key, whole)}
        if _WHOLE_NUMBER.fullmatch(gold):
            number = int(gold.replace(",", ""))
            responses |= {"rewritten": box(rf"\frac{{{2 * number}}}{{2}}"), "near miss": box(str(number + 1))}
        elif "\\frac" in gold:
            responses["rewritten"] = box(gold.replace("\\frac", "\\dfrac"))
        if others := [other for other in golds if other != gold]:
            responses["other answer"] = box(rng.choice(others))
        for form, response in responses.items():
            if response is not None:
                cases[form].append(Case(row.line, row.label, response, form in right))
    return {form: found for form, found in cases.items() if found}


def box(answer: str) -> str:
    return f"The final answer is $\\boxed{{{answer}}}$."


def check(pool: RewardPool, cases: Sequence[Case], workers: int) -> tuple[int, int, list[Miss]]:
    """How many cases were graded, how many accepted, and those where that was wrong."""

    def grade(case: Case) -> tuple[bool, str]:
        values = check_reward(pool([case.response], [""], [case.label]), pool.path)
        if isinstance(values, RewardFailure):
            return False, values.detail
        if values.score:
            return True, "accepted"
        return False, "not equal" if values.extra["format"] else "no answer found"

    with ThreadPoolExecutor(workers) as threads:
        grades = list(threads.map(grade, cases))
    misses = [
        Miss(case.line, gold_answer(case.label), case.response, why)
        for case, (accepted, why) in zip(cases, grades, strict=True)
        if accepted != case.is_right
    ]
    return len(cases), sum(accepted for accepted, _ in grades), misses


if __name__ == "__main__":
    sys.exit(main())
