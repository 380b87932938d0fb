"""The mathematics reward file as training runs it: by math-verify, in processes that are killed at their deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs the math-verify package")

from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, check_reward

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
REWARD = str(ROOT / "openrlhf_ext" / "rewards" / "math.py")
DATA = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared" / "data"))
PROMPT = "<|im_start|>user\nWhat is 1/2 + 1/2?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with closing(RewardPool(REWARD, deadline_s=60.0, workers=1)) as made:
        yield made


def answer(pool: RewardPool, response: str, label: object = "1"):
    return check_reward(pool([PROMPT + response], [PROMPT], [label]), pool.path)


def test_right_is_one_wrong_is_zero_and_the_format_is_logged(pool: RewardPool) -> None:
    right = answer(pool, "It is \\boxed{\\frac{2}{2}}.<|im_end|>")
    assert (right.reward, right.score, right.extra) == (1.0, 1.0, {"accuracy": 1.0, "format": 1.0})
    wrong = answer(pool, "It is \\boxed{2}.<|im_end|>")
    assert (wrong.reward, wrong.score, wrong.extra) == (0.0, 0.0, {"accuracy": 0.0, "format": 1.0})
    none = answer(pool, "It is 1.<|im_end|>")
    assert (none.reward, none.score, none.extra) == (0.0, 0.0, {"accuracy": 0.0, "format": 0.0})


def test_what_follows_the_end_of_the_text_does_not_count(pool: RewardPool) -> None:
    assert answer(pool, "\\boxed{1}<|im_end|>\\boxed{2}").score == 1.0


@pytest.mark.parametrize("tower", ["9^{9^{9^9}}", "9**9**9**9", "100000000!", "2^{10^9}"])
def test_math_verify_gives_up_by_itself_where_its_alarm_is_heard(pool: RewardPool, tower: str) -> None:
    assert answer(pool, f"\\boxed{{{tower}}}").score == 0.0


def test_a_label_without_an_answer_is_reported(pool: RewardPool) -> None:
    failure = answer(pool, "\\boxed{1}", "")
    assert isinstance(failure, RewardFailure)
    assert "holds no answer" in failure.detail


def test_c42_a_pathological_answer_is_killed_and_holds_up_no_other() -> None:
    # A deadline below math-verify's own, so that the pool is what ends the call.
    with closing(RewardPool(REWARD, deadline_s=3.0, workers=2)) as pool, ThreadPoolExecutor(2) as threads:
        late = threads.submit(answer, pool, "\\boxed{9^{9^{9^9}}}")
        others = [answer(pool, f"\\boxed{{{number}}}") for number in range(50)]
        assert [values.score for values in others] == [float(number == 1) for number in range(50)]
        assert late.result().kind == "deadline"
        assert answer(pool, "\\boxed{1}").score == 1.0  # by the worker that took its place, or the other


@pytest.mark.parametrize(("name", "rows"), [("math500", 500), ("gsm8k_test", 1319)])
def test_every_reference_solution_is_accepted_and_every_near_miss_refused(
    name: str, rows: int, tmp_path: Path
) -> None:
    file = DATA / f"{name}.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not there; set SHARED_DATA to the folder that has it")
    out = tmp_path / "report.json"
    command = [sys.executable, "scripts/check_grading.py", str(file), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    forms = json.loads(out.read_text())[name]
    for form in ("answer", "solution"):
        assert (forms[form]["graded"], forms[form]["accepted"]) == (rows, rows)
    assert forms["rewritten"]["accepted"] == forms["rewritten"]["graded"] > 300
    assert forms["near miss"]["accepted"] == 0 < forms["near miss"]["graded"]
    assert forms["other answer"]["accepted"] <= 2  # equal after all, such as 1,-2 and -2,1
