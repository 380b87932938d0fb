"""Leaves no process behind: runs a function in a child and, when it ends for any reason, ends all its descendants.

Ray daemons and vLLM engine processes detach from their parents, so killing the driver alone leaves them running. The
supervisor makes itself their subreaper (Linux): an orphaned descendant becomes its child instead of init's, so it can
find and end exactly the processes that this run started, and no others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from openrlhf_ext.stopping import EXIT_REQUEUE

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_EXIT_CODES = {
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    signal.SIGUSR1: EXIT_REQUEUE,  # as long as nobody else handles it, nothing is lost by starting again
}

# A driver that was asked to stop gets this long before it is killed; its descendants then get the shorter time.
STOP_GRACE_S = 30.0
_ORPHAN_GRACE_S = 1.0


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def supervise(target: Callable[[], int], *, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Run ``target`` in a forked child; return its exit code (128 + n when signal n ended it).

    SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to the child only; the child raises ``SystemExit`` for them
    (``KeyboardInterrupt`` for SIGINT), so that ``finally`` blocks run, and is killed ``stop_grace_s`` after the first
    one. The exit code after SIGUSR1 is `stopping.EXIT_REQUEUE`. Must be called from the main thread, before threads
    are started.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.getpid()
    # Held back until both sides can handle them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        _run_child(target, supervisor, mask)
    asked_at: list[float] = []
    status: int | None = None

    def forward(number: int, _frame: object) -> None:
        asked_at.append(time.monotonic())
        if status is None:  # not waited for yet, so the number still names our child
            _kill(child, number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        status = _wait(child, asked_at, stop_grace_s)
    finally:
        _end_descendants()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _run_child(target: Callable[[], int], supervisor: int, mask: set[signal.Signals]) -> None:
    """Never returns. Its own process group: Ctrl-C must reach the driver once, not every worker."""
    code = 1
    stopped_by: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped_by.append(number)
        sys.exit(_EXIT_CODES[number])

    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os._exit(1)
        for number in _EXIT_CODES:
            signal.signal(number, stop)
        # A shell starts background jobs with SIGINT ignored, which Python leaves so; one that is passed on is meant.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = target()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Ray turns the SystemExit of a handler that ran inside a call of it into one with code 1.
        os._exit(_EXIT_CODES[stopped_by[0]] if stopped_by and code == 1 else code)


def _wait(child: int, asked_at: list[float], stop_grace_s: float) -> int:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return status
        if asked_at and time.monotonic() - asked_at[0] > stop_grace_s:
            _kill(child, signal.SIGKILL)
        time.sleep(0.05)


def _end_descendants() -> None:
    """SIGTERM, then SIGKILL, every process that is or becomes our child, until there is none."""
    give_up = time.monotonic() + _ORPHAN_GRACE_S
    asked: set[int] = set()
    while True:
        for pid in _children():
            if time.monotonic() > give_up:
                _kill(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                _kill(pid, signal.SIGTERM)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.05)


def _children() -> list[int]:
    """Process ids whose parent is this process, from /proc."""
    me = os.getpid()
    children = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                # The command name is in parentheses and may contain anything, so split after the last one.
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == me:
            children.append(int(entry))
    return children


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
