import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, RewardValues, check_reward

REWARD_FILE = """
import os, signal, sys, time

def reward_func(queries, prompts, labels):
    (query,) = queries
    if query == "loop":
        while True:
            pass
    if query == "power tower":  # one call into C that holds the interpreter lock
        9 ** 9 ** 9
    if query == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if query == "child":
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
    if query == "raise":
        return 1 / 0
    if query == "exit":
        sys.exit("enough")
    if query == "die":
        os._exit(3)
    if query == "alarm":  # as math-verify does; only possible in the main thread
        signal.alarm(0)
        return {"rewards": 1.0}
    if query == "modules":
        heavy = ("torch", "numpy", "ray", "vllm", "transformers", "pytest", "openrlhf_ext.rewards.pool")
        return {"rewards": 0.0, "loaded": [name for name in heavy if name in sys.modules]}
    if query == "pid":
        return {"rewards": os.getpid()}
    return {"rewards": float(len(query)), "prompt": prompts[0], "label": labels[0]}
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(REWARD_FILE)
    return str(path)


@contextlib.contextmanager
def pool_of(path, deadline_s=60.0, workers=1):
    with contextlib.closing(RewardPool(path, deadline_s, workers)) as pool:
        yield pool


def ask(pool, query):
    return pool([query], ["a prompt"], ["a label"])


def children_of(pid):
    """Process ids of living children, from /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, state, parent = re.match(r"\d+ \((.*)\) (\S) (\d+)", stat.read_text(), re.DOTALL).groups()
            if int(parent) == pid and state != "Z":
                found.add(int(stat.parent.name))
    return found


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition):
    """Poll; the test fails by its own assertion when the condition stays false for a minute."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_call_gives_what_the_function_returned(reward_file):
    with pool_of(reward_file) as pool:
        assert ask(pool, "abc") == {"rewards": 3.0, "prompt": "a prompt", "label": "a label"}


def test_calls_from_many_threads_each_get_their_own_answer(reward_file):
    with pool_of(reward_file, workers=2) as pool, ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda length: ask(pool, "x" * length)["rewards"], range(128)))
    assert answers == [float(length) for length in range(128)]


@pytest.mark.parametrize("query", ["loop", "power tower", "stubborn", "child"])
def test_a_late_call_is_killed_and_its_worker_replaced(reward_file, query):
    with pool_of(reward_file, deadline_s=1.0) as pool:
        late = ask(pool, query)
        assert (late.kind, late.detail) == ("deadline", f"{reward_file} took longer than 1 s")
        assert ask(pool, "abc")["rewards"] == 3.0


def test_other_calls_are_answered_while_one_hangs(reward_file):
    with pool_of(reward_file, deadline_s=600.0, workers=2) as pool, ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(ask, pool, "power tower")
        assert [ask(pool, "x" * length)["rewards"] for length in range(50)] == [float(n) for n in range(50)]
        assert not hanging.done()
        pool.close()
        assert hanging.result().kind == "died"


def test_waiting_for_a_worker_does_not_count_against_the_deadline(reward_file):
    with pool_of(reward_file, deadline_s=1.0) as pool, ThreadPoolExecutor(3) as threads:
        first = [threads.submit(ask, pool, "loop") for _ in range(2)]
        last = threads.submit(ask, pool, "abc")
        assert [call.result().kind for call in first] == ["deadline", "deadline"]
        assert last.result()["rewards"] == 3.0  # whether it came before, between or after the two


def test_an_exception_is_reported_with_its_line_and_the_worker_stays(reward_file):
    with pool_of(reward_file) as pool:
        before = ask(pool, "pid")
        line = 1 + REWARD_FILE.splitlines().index("        return 1 / 0")
        detail = f"{reward_file} raised ZeroDivisionError: division by zero (reward.py:{line})"
        assert ask(pool, "raise") == RewardFailure("exception", detail)
        assert "SystemExit: enough" in ask(pool, "exit").detail
        assert ask(pool, "pid") == before


def test_a_call_that_ends_its_process_is_reported_and_the_worker_replaced(reward_file):
    with pool_of(reward_file) as pool:
        assert ask(pool, "die") == RewardFailure("died", f"{reward_file} ended its process (exit status 3)")
        assert ask(pool, "abc")["rewards"] == 3.0


def test_a_worker_killed_while_idle_costs_no_answer(reward_file):
    with pool_of(reward_file) as pool:
        worker = int(ask(pool, "pid")["rewards"])
        os.kill(worker, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(worker))
        assert ask(pool, "abc")["rewards"] == 3.0


def test_the_function_runs_in_a_main_thread(reward_file):
    with pool_of(reward_file) as pool:
        assert ask(pool, "alarm") == {"rewards": 1.0}


def test_workers_load_nothing_but_the_reward_file(reward_file):
    with pool_of(reward_file) as pool:
        assert ask(pool, "modules")["loaded"] == []


def test_tensors_come_back_as_numbers(tmp_path):
    path = tmp_path / "tensors.py"
    path.write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    logs = {'many': torch.ones(2)}\n"
        "    return {'rewards': torch.tensor([0.5]), 'scores': torch.ones(1, 1), 'extra_logs': logs}\n"
    )
    with pool_of(str(path)) as pool:
        assert ask(pool, "x") == {"rewards": 0.5, "scores": 1.0, "extra_logs": {"many": [1.0, 1.0]}}


def test_nothing_is_left_behind_after_close(reward_file):
    before = children_of(os.getpid())
    pool = RewardPool(reward_file, 600.0, 2)
    workers = children_of(os.getpid()) - before
    assert len(workers) == 2
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(ask, pool, "child") for _ in range(2)]
        assert wait_until(lambda: all(children_of(worker) for worker in workers))
        grandchildren = set().union(*(children_of(worker) for worker in workers))
        calls.append(threads.submit(ask, pool, "abc"))  # waits for a worker
        pool.close()
        assert [call.result().kind for call in calls] == ["died"] * 3
    assert children_of(os.getpid()) == before
    assert wait_until(lambda: not any(is_alive(pid) for pid in grandchildren))
    assert ask(pool, "abc") == RewardFailure("died", "the reward pool is closed")
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="relies on PR_SET_PDEATHSIG")
def test_workers_die_with_a_killed_parent_even_inside_a_hanging_call(reward_file):
    script = (
        "import sys, threading\n"
        "from openrlhf_ext.rewards.pool import RewardPool\n"
        "pool = RewardPool(sys.argv[1], 600.0, 2)\n"
        "threading.Thread(target=pool, args=(['power tower'], [''], [''])).start()\n"
        "print('ready', flush=True)\n"
    )
    command = [sys.executable, "-c", script, reward_file]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "ready\n"
        workers = children_of(parent.pid)
        assert len(workers) == 2
        parent.kill()
    assert wait_until(lambda: not any(is_alive(worker) for worker in workers))


def test_workers_outlive_the_thread_that_made_the_pool(reward_file):
    made = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(reward_file, 60.0, 1)))
    thread.start()
    thread.join()
    with contextlib.closing(made[0]) as pool:
        worker = ask(pool, "pid")
        replaced = threading.Thread(target=ask, args=(pool, "die"))
        replaced.start()
        replaced.join()
        second = ask(pool, "pid")
        assert second != worker
        assert ask(pool, "pid") == second


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def reward_func(:", "SyntaxError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (reward.py:1)"),
        ("def reward(queries): ...", "has no attribute 'reward_func'"),
        ("import os; os._exit(1)", "its process ended while loading it"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_reward_file_that_cannot_be_loaded_is_an_error_at_once(tmp_path, text, problem):
    before = children_of(os.getpid())
    path = tmp_path / "reward.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"Cannot load reward file {path}: ")) as error:
        RewardPool(str(path), 1.0, 2)
    assert problem in str(error.value)
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize(
    ("deadline_s", "workers"), [(0.0, 1), (-1.0, 1), (float("nan"), 1), (float("inf"), 1), (1.0, 0)]
)
def test_deadline_and_workers_are_checked(reward_file, deadline_s, workers):
    with pytest.raises(ValueError, match="workers >= 1 and deadline_s > 0"):
        RewardPool(reward_file, deadline_s, workers)


def test_a_file_that_breaks_later_fails_calls_and_recovers(reward_file):
    text = Path(reward_file).read_text()
    with pool_of(reward_file) as pool:
        Path(reward_file).write_text("broken(")
        assert ask(pool, "die").kind == "died"
        failure = ask(pool, "abc")
        assert failure.kind == "exception" and "Cannot load reward file" in failure.detail
        Path(reward_file).write_text(text)
        answers = [ask(pool, "abc") for _ in range(2)]  # the first may meet one more start with the broken file
        assert answers[-1]["rewards"] == 3.0


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        [1.0],
        [[1]],
        np.float32(1),
        np.int64(1),
        np.array([1.0]),
        torch.tensor(1.0),
        torch.tensor([1]),
        torch.ones(1, 1, dtype=torch.bfloat16),
        torch.tensor([1.0], requires_grad=True),
        Fraction(1),
        Decimal(1),
    ],
)
def test_one_number_in_any_wrapping_is_a_reward(value):
    assert check_reward({"rewards": value}, "reward.py") == RewardValues(reward=1.0, score=1.0, extra={})


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, 'must return a dict with the key "rewards", got None'),
        (1.0, 'must return a dict with the key "rewards", got 1.0'),
        ([1.0], 'must return a dict with the key "rewards", got [1.0]'),
        ({}, 'must return a dict with the key "rewards", got the keys []'),
        ({"reward": 1.0}, "got the keys ['reward']"),
        ({"rewards": None}, 'must give one finite number as "rewards" for one query, got None'),
        ({"rewards": "1"}, "got '1'"),
        ({"rewards": [1.0, 0.0]}, "got [1.0, 0.0]"),
        ({"rewards": []}, "got []"),
        ({"rewards": torch.ones(2)}, "got [1.0, 1.0]"),
        ({"rewards": float("nan")}, "got nan"),
        ({"rewards": torch.tensor([float("inf")])}, "got inf"),
        ({"rewards": 10**400}, "got 1000"),
        ({"rewards": 1 + 2j}, "got 'an object of type complex'"),
        ({"rewards": object()}, "got 'an object of type object'"),
        ({"rewards": 1.0, "scores": "yes"}, "must give one finite number as \"scores\" for one query, got 'yes'"),
        ({"rewards": 1.0, "extra_logs": [1]}, 'must give a dict of numbers as "extra_logs", got [1]'),
    ],
)
def test_anything_else_is_invalid_with_the_file_and_the_value_named(result, problem):
    failure = check_reward(result, "my/reward.py")
    assert failure.kind == "invalid"
    assert failure.detail.startswith("reward_func in my/reward.py ") and problem in failure.detail


def test_scores_default_to_rewards_and_logs_to_nothing():
    assert check_reward({"rewards": 0.1, "scores": None, "extra_logs": None}, "f") == RewardValues(0.1, 0.1, {})
    assert check_reward({"rewards": 0.1, "scores": False}, "f") == RewardValues(0.1, 0.0, {})


def test_logs_that_are_no_numbers_are_dropped_by_name():
    logs = {"length": 7, "format": torch.tensor([1.0]), "why": "too long", "loss": float("nan"), "list": [1, 2]}
    values = check_reward({"rewards": 1.0, "extra_logs": logs}, "f")
    assert values == RewardValues(1.0, 1.0, {"length": 7.0, "format": 1.0}, dropped=("why", "loss", "list"))


def test_a_failed_call_passes_through():
    failure = RewardFailure("deadline", "late")
    assert check_reward(failure, "f") is failure
