"""The training as a job of Ray's job API: a head of our own or a cluster that runs, submit, follow, stop.

Exit codes beside those of the training itself:

=======  ==============================================================================
1        the job failed without an exit code of its command; the reason is printed
2        the cluster refused the request: token, runtime environment, size of the upload
70       our Ray head ended while it started
71       the cluster took no job in time
72       the cluster was lost while the job ran
128 + n  signal n, after which the job was stopped (143: somebody else stopped it)
=======  ==============================================================================
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.adapters.upstream import first_line
from openrlhf_ext.run_dir import RunDirectory
from openrlhf_ext.supervisor import supervise

EXIT_HEAD_DIED, EXIT_NOT_READY, EXIT_LOST = 70, 71, 72

_POLL_S = 0.5
_PENDING_NOTICE_S = 30.0
_LOST_S = 60.0
"""Without an answer of the cluster, until the job is given up."""
_STOP_SLACK_S = 15.0
"""For Ray to report the end of a job that it has killed."""
_REQUEST_TIMEOUT_S = (10.0, 60.0)
"""To connect, and between two bytes of the answer."""
_SAME_SIGNAL_S = 1.0
"""`timeout` and terminals send a signal to a process and to its group: the same request."""
_LONGEST_TEMP_DIR = 45
"""Characters: Ray's sockets are up to 60 deeper, and Linux ends the path of a socket at 107."""
_START_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """What is submitted.

    ``runtime_env`` and ``resources`` are the arguments of Ray's ``submit_job``; ``stop_wait_s`` is what Ray grants the
    command after SIGTERM.
    """

    command: str
    runtime_env: Mapping[str, object]
    resources: Mapping[str, Any]
    stop_wait_s: int
    start_timeout_s: float
    run_dir: Path
    wait: bool = True


class _Refused(Exception):
    """The cluster will never take this request."""


class _Stop:
    """Notes the first signal; a second one ends this process at once."""

    def __init__(self, at_once: str) -> None:
        self.number: int | None = None
        self._at = 0.0
        self._at_once = at_once
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._note)

    @property
    def exit_code(self) -> int:
        # Ray's jobs know no SIGUSR1, and do not tell whether the job saved before it ended.
        number = signal.SIGTERM if self.number in (None, signal.SIGUSR1) else self.number
        return 128 + number

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._at = number, time.monotonic()
        elif time.monotonic() - self._at > _SAME_SIGNAL_S:
            os.write(2, f"ray_job: {self._at_once}\n".encode())
            os._exit(self.exit_code)


def run_here(job: Job, needed_gpus: int) -> int:
    """Start a Ray head on this machine, run the job on it, end the head. Ray's logs are kept in the run directory.

    On a machine without a GPU the head has ``needed_gpus`` logical ones, on which the run places its models.
    """
    base = os.environ.get("RAY_TMPDIR", "/tmp")
    if len(base) > _LONGEST_TEMP_DIR - len("/rj-12345678"):
        return _refuse(f"RAY_TMPDIR={base} is too long a path for Ray's sockets; use a shorter one, or unset it")
    try:
        temp = Path(tempfile.mkdtemp(prefix="rj-", dir=base))
    except OSError as error:
        return _refuse(f"no folder for Ray's files: {error}; set RAY_TMPDIR to a short path that can be written")
    try:
        return supervise(lambda: _on_own_head(job, needed_gpus, temp), stop_grace_s=_grace_s(job))
    finally:
        _keep_logs(temp, job.run_dir)
        shutil.rmtree(temp, ignore_errors=True)


def run_on(address: str, job: Job) -> int:
    """Run the job on the cluster with this dashboard, which is left as it is."""
    return supervise(lambda: _on_cluster(job, address), stop_grace_s=_grace_s(job))


def no_client_server(ray_params, head: bool) -> None:
    """Ray's start hook: the server of Ray Client has a fixed port, which a second head could not have."""
    ray_params.ray_client_server_port = None


def exit_code(status: str, driver_exit_code: int | None, stopped: int) -> int:
    """The exit code for a job that has ended.

    Args:
        status: SUCCEEDED, FAILED or STOPPED.
        driver_exit_code: of the job's command, as Ray has it; negative for a signal.
        stopped: the code for a job that was stopped, whose own Ray does not keep.
    """
    if status == "STOPPED":
        return stopped
    if driver_exit_code is None:
        return 0 if status == "SUCCEEDED" else 1
    return driver_exit_code if driver_exit_code >= 0 else 128 - driver_exit_code


def _say(text: str) -> None:
    print(f"ray_job: {text}", file=sys.stderr, flush=True)


def _refuse(text: str) -> int:
    print(f"error: {text}", file=sys.stderr, flush=True)
    return 2


def _grace_s(job: Job) -> float:
    return job.stop_wait_s + 2 * _STOP_SLACK_S


def _only_this_cluster() -> None:
    """Ray's client prefers these variables to the address that it is given."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        if os.environ.pop(name, None):
            _say(f"{name} is set and ignored: --address alone says which cluster is used")


def _on_cluster(job: Job, address: str) -> int:
    _only_this_cluster()
    stop = _Stop("not waiting any longer; Ray still stops the job, and kills it when its time is over")
    place = "session_latest/logs in Ray's temporary folder on its head node (/tmp/ray if not told otherwise)"
    return _Submission(address, job, stop, place).run()


def _on_own_head(job: Job, needed_gpus: int, temp: Path) -> int:
    _only_this_cluster()
    stop = _Stop("ending the job and Ray at once")
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_START_HOOK": f"{__name__}.no_client_server",
    }
    sizes: list[str] = []  # what Ray finds
    if cpu_platform.active():
        num_cpus = needed_gpus + 1 + math.ceil(job.resources.get("entrypoint_num_cpus") or 0)
        sizes = [f"--num-cpus={num_cpus}", f"--num-gpus={needed_gpus}"]
    for _ in range(_START_ATTEMPTS):
        port = free_port()
        process, gcs_address = _start_head(sizes, temp, port, stop)
        if gcs_address or stop.number is not None or "Failed to bind" not in _head_log(temp):
            break
    if stop.number is not None:
        return stop.exit_code
    if not gcs_address:
        _say(f"Ray's head ended with {process.returncode} while it started:\n{_head_log(temp)[-2000:]}")
        return EXIT_HEAD_DIED
    address = f"http://127.0.0.1:{port}"
    _say(f"Ray is up, its dashboard at {address}")
    # Ray looks for the address in the table of processes and takes any head of this machine where it finds several.
    job = replace(job, command=f"export RAY_ADDRESS={gcs_address}; {job.command}")
    return _Submission(address, job, stop, f"{job.run_dir}/ray_logs", head=process).run()


def free_port() -> int:
    """A port for the dashboard below those that the system hands out, so that only another head could take it."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port on 127.0.0.1 from 20000 to 32767 for Ray's dashboard")


def _start_head(sizes: list[str], temp: Path, port: int, stop: _Stop) -> tuple[subprocess.Popen, str]:
    """The process of ``ray start`` and the address of the cluster; "" when it ended or a signal came first."""
    with open(temp / "ray_start.log", "w") as log:
        process = subprocess.Popen(
            # 0: any free port. The ranges and ports that Ray takes otherwise are the same for every head.
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
            + ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
            + ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
            + [f"--temp-dir={temp}", "--log-color=false", *sizes],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    address_file = temp / "ray_current_cluster"  # written when all is up
    while process.poll() is None and stop.number is None:
        if address_file.exists() and (address := address_file.read_text().strip()):
            return process, address
        time.sleep(0.1)
    return process, ""


def _head_log(temp: Path) -> str:
    return (temp / "ray_start.log").read_text(errors="replace")


def _keep_logs(temp: Path, run_dir: Path) -> None:
    """Ray's logs, to which the run directory has a link, would go with the temporary folder."""
    sessions = [path for path in temp.glob("session_2*") if (path / "logs").is_dir()]
    kept = run_dir / "ray_logs" / (sessions[0].name if sessions else temp.name)
    for session in sessions:
        shutil.copytree(session / "logs", kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
        for folder in (kept, *(path for path in kept.rglob("*") if path.is_dir())):
            folder.chmod(0o755)  # Ray lets everybody write there
    if (temp / "ray_start.log").exists():
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(temp / "ray_start.log", kept)
        RunDirectory(str(run_dir)).link_logs(str(kept.relative_to(run_dir)))


class _Submission:
    """One job on one cluster."""

    def __init__(
        self, address: str, job: Job, stop: _Stop, logs: str, *, head: subprocess.Popen | None = None
    ) -> None:
        self._address, self._job, self._stop, self._logs, self._head = address, job, stop, logs, head
        self._id = f"openrlhf_ext-{secrets.token_hex(6)}"

    def run(self) -> int:
        try:
            client = self._submit()
        except _Refused as error:
            return _refuse(str(error))
        if client is None:
            if self._stop.number is not None:
                return self._stop.exit_code
            return EXIT_NOT_READY if self._is_head_up() else EXIT_HEAD_DIED
        _say(f"job {self._id} submitted to {self._address}")
        if not self._job.wait:
            for what in ("logs --follow", "stop"):
                _say(f"RAY_API_SERVER_ADDRESS={self._address} ray job {what} {self._id}")
            return 0
        return self._follow(client)

    def _submit(self):
        """A client for the cluster that has taken the job; None after a signal or the time limit."""
        # Imported for the levels that it gives its loggers, which would undo those below.
        import ray.job_submission  # noqa: F401
        import requests
        from ray.exceptions import AuthenticationError

        os.environ["RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES"] = ""  # a warning for each; ours have them
        for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
            logging.getLogger(name).setLevel(logging.WARNING)
        give_up = time.monotonic() + self._job.start_timeout_s
        reason = ""
        client = None
        while self._stop.number is None and self._is_head_up():
            try:
                client = client or _client(self._address)
                client.submit_job(
                    entrypoint=self._job.command,
                    submission_id=self._id,
                    runtime_env=dict(self._job.runtime_env),  # changed in place
                    **self._job.resources,
                )
                return client
            except AuthenticationError as error:
                raise _Refused(
                    f"{self._address} wants a token: {first_line(error)}; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
                    "or RAY_AUTH_TOKEN_PATH to those of the cluster"
                ) from None
            except (ConnectionError, RuntimeError, requests.RequestException) as error:
                text = str(error)
                if "already exists" in text:  # the answer to an earlier attempt was lost
                    return client
                if "status code 413" in text:
                    raise _Refused(
                        "the working directory is more than Ray takes (100 MiB, packed); leave parts out by --exclude "
                        "or a .rayignore file, or give a smaller --working-dir"
                    ) from None
                if "status code 4" in text or "returned 404" in text:
                    raise _Refused(f"{self._address} refuses the job: {text}") from None
                if first_line(error) != reason:
                    reason = first_line(error)
                    _say(f"waiting for {self._address}: {reason}")
            except (ValueError, TypeError, OSError) as error:
                raise _Refused(f"the job cannot be submitted: {error}; see --runtime-env and --working-dir") from None
            if time.monotonic() > give_up:
                _say(
                    f"{self._address} took no job within {self._job.start_timeout_s:g} s; Ray's logs: {self._logs}, "
                    "there dashboard_agent.log and dashboard.log"
                )
                break
            time.sleep(_POLL_S)
        if not self._is_head_up():
            _say(f"Ray's head ended before it took the job; its logs: {self._logs}")
        if client is not None:  # the last request may have arrived
            _quietly(client.stop_job, self._id)
        return None

    def _follow(self, client) -> int:
        log = threading.Thread(target=_print_log, args=(client, self._id), daemon=True)
        log.start()
        began = answered = time.monotonic()
        stopping = 0.0
        noticed = False
        while True:
            now = time.monotonic()
            if self._stop.number is not None:
                if not stopping:
                    stopping = now
                    name = signal.Signals(self._stop.number).name
                    _say(
                        f"{name}: stopping job {self._id}, which has {self._job.stop_wait_s} s to end its step and "
                        f"save; again: {'end at once' if self._head else 'do not wait'}"
                    )
                _quietly(client.stop_job, self._id)  # until it has ended: a request may be lost
            info = _quietly(client.get_job_info, self._id)
            if info is not None:
                answered = now
                if info.status.is_terminal():
                    break
                if info.status == "PENDING" and not noticed and now - began > _PENDING_NOTICE_S:
                    noticed = True
                    _say(f"the job still waits: {info.message or 'no reason given'}")
            if not self._is_head_up() or now - answered > _LOST_S:
                _say(f"the cluster at {self._address} is lost; Ray's logs: {self._logs}")
                return EXIT_LOST
            if stopping and now - stopping > self._job.stop_wait_s + _STOP_SLACK_S:
                _say(f"job {self._id} has not stopped; see {self._address}/#/jobs/{self._id}")
                return self._stop.exit_code
            time.sleep(_POLL_S)
        log.join(timeout=_STOP_SLACK_S)
        status = info.status.value
        code = exit_code(status, info.driver_exit_code, self._stop.exit_code)
        if status == "FAILED" and info.driver_exit_code is None:
            _say(f"the job failed: {info.message}")
        _say(f"job {self._id} {status}, exit code {code}" + (f"; Ray's logs: {self._logs}" if code else ""))
        return code

    def _is_head_up(self) -> bool:
        return self._head is None or self._head.poll() is None


def _client(address: str):
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """Ray's own has no time limit for a request."""

        def _do_request(self, *args, **kwargs):
            return super()._do_request(*args, timeout=_REQUEST_TIMEOUT_S, **kwargs)

    return Client(address)


def _quietly(call, *args):
    """The result, or None while the cluster gives none."""
    try:
        return call(*args)
    except Exception:
        return None


def _print_log(client, job_id: str) -> None:
    """Copy the job's output until it ends. After a broken connection Ray sends it from the start."""
    printed = 0

    async def follow() -> None:
        nonlocal printed
        seen = 0
        async for text in client.tail_job_logs(job_id):
            seen += len(text)
            if seen > printed:
                sys.stdout.write(text[-(seen - printed) :])
                sys.stdout.flush()
                printed = seen

    while True:
        try:
            return asyncio.run(follow())
        except BrokenPipeError:
            return None
        except Exception:  # aiohttp's, and RuntimeError for a connection that broke
            time.sleep(_POLL_S)
