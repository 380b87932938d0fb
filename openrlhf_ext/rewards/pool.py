"""Run any OpenRLHF reward file in processes that can be killed.

OpenRLHF calls `reward_func` in a thread, and a thread that hangs (a power tower in sympy, a regular expression that
backtracks) cannot be stopped: it holds a thread of the pool, and inside C code the whole engine, for ever. Here every
call runs in a worker process under a deadline. A late call costs its own process, nothing else.

Why not a library's process pool: `concurrent.futures` cannot kill; pebble can, but starts workers through
`multiprocessing`, which imports the parent's main module again (in an engine, Ray's and all it imports), and leaves a
worker that hangs in C code behind when the engine itself is killed.
"""

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from openrlhf_ext.rewards.result import RewardFailure
from openrlhf_ext.rewards.worker import PlainValue

START_TIMEOUT_S = 120.0
"""Bound on loading the reward file, which may import torch or read a model."""

_START = (
    "import sys; fd, parent, path, *sys.path[:] = sys.argv[1:]; "
    "from openrlhf_ext.rewards.worker import main; main(int(fd), int(parent), path)"
)
"""Started this way a worker imports neither the parent's main module nor the wrong package of a name."""

_CLOSED = RewardFailure("died", "the reward pool is closed")


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    def kill(self) -> None:
        """Kill the process, with all it started itself, and wait for its end."""
        if self.process.returncode is None:  # not waited for yet, so the number still names our process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class RewardPool:
    """Calls the `reward_func` of one reward file, under a deadline, from any number of threads.

    A calling thread takes an idle worker and owns it for the call; nothing else stands in between. The deadline counts
    from there: a call that had to wait for a worker is not late for it.

    Memory is not capped: RLIMIT_AS counts address space, of which importing torch alone reserves gigabytes.

    Args:
        path: the reward file. It is loaded in the workers only.
        deadline_s: seconds that one call may take.
        workers: processes, and so calls that run at the same time.

    Raises:
        ValueError: the reward file cannot be loaded, or a number is out of range.
    """

    def __init__(self, path: str, deadline_s: float, workers: int) -> None:
        if workers < 1 or not 0 < deadline_s < math.inf:
            raise ValueError(f"A reward pool needs workers >= 1 and deadline_s > 0, got {workers} and {deadline_s}.")
        self.path = os.path.abspath(path)
        self.deadline_s = deadline_s
        self._closed = False
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: queue.SimpleQueue[_Worker | RewardFailure] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # A worker dies with the thread that started it: these live as long as the pool, or the process.
        self._starters = [threading.Thread(target=self._start_workers, daemon=True) for _ in range(workers)]
        for starter in self._starters:
            starter.start()
            self._wanted.put(True)
        for entry in [self._idle.get() for _ in range(workers)]:
            if isinstance(entry, RewardFailure):
                self.close()
                raise ValueError(entry.detail)
            self._idle.put(entry)

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]
    ) -> PlainValue | RewardFailure:
        """What the reward function returned, in plain Python types, or why there is nothing. Blocks the caller."""
        worker = self._take()
        if isinstance(worker, RewardFailure):
            return worker
        try:
            worker.connection.send((list(queries), list(prompts), list(labels)))
            in_time = worker.connection.poll(self.deadline_s)
            status, value = worker.connection.recv() if in_time else ("deadline", None)
        except (EOFError, OSError):
            status, value = "died", None
        if status in ("ok", "exception"):
            self._idle.put(worker)
            return value if status == "ok" else RewardFailure("exception", f"{self.path} raised {value}")
        self._replace(worker)
        if status == "deadline":
            return RewardFailure("deadline", f"{self.path} took longer than {self.deadline_s:g} s")
        return RewardFailure("died", f"{self.path} ended its process (exit status {worker.process.returncode})")

    def close(self) -> None:
        """Kill all workers. Calls that are running or waiting end as `died`; so do later ones."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()
        self._idle.put(_CLOSED)
        for _ in self._starters:
            self._wanted.put(False)
        for starter in self._starters:
            starter.join()

    def _take(self) -> _Worker | RewardFailure:
        while True:
            entry = self._idle.get()
            if self._closed:
                self._idle.put(entry)  # wakes the next caller that waits
                return _CLOSED
            if isinstance(entry, RewardFailure):  # a worker could not be started: this call fails, the next may not
                self._wanted.put(True)
                return entry
            if entry.process.poll() is None:
                return entry
            self._replace(entry)

    def _replace(self, worker: _Worker) -> None:
        """Kill a worker and have another one started, without waiting for it."""
        self._discard(worker)
        self._wanted.put(True)

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        worker.connection.close()
        with self._lock:
            self._workers.discard(worker)

    def _start_workers(self) -> None:
        while self._wanted.get():
            try:
                self._idle.put(self._start())
            except (OSError, ValueError) as error:
                self._idle.put(RewardFailure("exception", str(error)))

    def _start(self) -> _Worker:
        """Start a worker and wait until it has loaded the reward file."""
        ours, theirs = Pipe()
        with theirs, self._lock:
            if self._closed:
                raise ValueError(_CLOSED.detail)
            arguments = [str(theirs.fileno()), str(os.getpid()), self.path, *sys.path]
            process = subprocess.Popen(
                [sys.executable, "-c", _START, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group to kill, which Ctrl-C in the terminal does not reach
            )
            worker = _Worker(process, ours)
            self._workers.add(worker)
        problem = self._loading_problem(worker)
        if problem:
            self._discard(worker)
            raise ValueError(
                f"Cannot load reward file {self.path}: {problem}. "
                "It must be a Python file that defines reward_func(queries, prompts, labels)."
            )
        return worker

    def _loading_problem(self, worker: _Worker) -> str:
        try:
            if not worker.connection.poll(START_TIMEOUT_S):
                return f"it did not finish loading in {START_TIMEOUT_S:g} s"
            status, description = worker.connection.recv()
        except (EOFError, OSError):
            return "its process ended while loading it"
        return "" if status == "ok" else description
