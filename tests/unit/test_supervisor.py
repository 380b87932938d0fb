"""Real processes: whatever way the child ends, nothing that it started is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, subprocess, sys, time
from openrlhf_ext.supervisor import supervise

# Ignores SIGTERM and lives in a session of its own, as a daemon would.
DAEMON = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

def target():
    for _ in range(2):
        daemon = subprocess.Popen([sys.executable, "-c", DAEMON], start_new_session=True)
        print("daemon", daemon.pid, flush=True)
    time.sleep(0.3)
    {ending}

sys.exit(supervise(target{options}))
"""

# In short sleeps: a signal that arrives just before a sleep begins is only seen by Python when the sleep ends.
WAIT = """
    try:
        print('ready', flush=True)
        for _ in range(6000):
            time.sleep(0.1)"""

ENDINGS = {
    "returns": ("return 7", 7),
    "raises": ("raise ValueError('no')", 1),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
}


def start(ending, options=""):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("{ending}", ending).replace("{options}", options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def daemons(output):
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("daemon")]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("case", ENDINGS)
def test_nothing_is_left_when_the_child(case):
    ending, code = ENDINGS[case]
    process = start(ending)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert len(daemons(output)) == 2
    assert not any(map(is_running, daemons(output)))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 85)]
)
def test_a_signal_to_the_supervisor_ends_everything_and_runs_the_childs_finally(number, code):
    process = start(f"{WAIT}\n    finally:\n        print('cleaned', flush=True)")
    lines = []
    while "ready\n" not in lines:
        lines.append(process.stdout.readline())
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "cleaned" in output
    assert not any(map(is_running, daemons("".join(lines))))


def test_ctrl_c_reaches_a_run_that_a_shell_started_in_the_background():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does with its background jobs; inherited
    try:
        process = start(f"{WAIT}\n    finally:\n        pass")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert "ready\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT


def test_a_bystander_is_left_alone():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start("return 0").communicate(timeout=60)
        time.sleep(0.1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)])
def test_a_library_that_changes_the_exit_code_of_the_signal_does_not_change_the_outcome(number, code):
    process = start(f"{WAIT}\n    except SystemExit:\n        sys.exit(1)")
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code


def test_a_child_that_has_saved_in_the_end_says_so_itself():
    process = start(f"{WAIT}\n    except SystemExit:\n        sys.exit(85)")
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 85


def test_signals_that_come_while_the_descendants_are_ended_do_not_leave_them():
    # The daemons take a second to end: they ignore SIGTERM.
    process = start("return 7")
    lines = [process.stdout.readline() for _ in range(2)]
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    while is_running(child):
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process.send_signal(number)
    process.communicate(timeout=60)
    assert not any(map(is_running, daemons("".join(lines))))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_child_that_does_not_stop_in_its_time_is_killed(name):
    process = start(
        f"signal.signal(signal.{name}, signal.SIG_IGN)\n{WAIT}\n    finally:\n        pass", ", stop_grace_s=0.1"
    )
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.Signals[name])
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
