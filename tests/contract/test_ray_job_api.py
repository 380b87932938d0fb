"""Ray's job client and packaging as ray_job uses them, against a job server that answers what it is told to."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from ray._private.parameter import RayParams
from ray._private.runtime_env.packaging import create_package

from openrlhf_ext.adapters import cpu_platform, ray_job
from openrlhf_ext.adapters.ray_job import EXIT_HEAD_DIED, EXIT_NOT_READY, Job, _Submission, no_client_server
from openrlhf_ext.cli.ray_job import LARGEST_FILE, excluded_paths

NO_AGENT = (500, "No available agent to submit job, please try again later.")
TAKEN = (200, "")


class JobServer:
    """The routes of Ray's dashboard that a submission needs; its job prints 12 lines and exits with 7.

    ``submissions`` are the answers to submissions, the last one again and again. The log breaks off ``breaks`` times
    after its fifth line.
    """

    def __init__(self) -> None:
        self.submissions = [TAKEN]
        self.breaks = 0
        self.asked: list[dict] = []
        self.stopped: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._ready.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/version", self._version),
                web.get("/api/packages/{protocol}/{name}", self._package),
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{id}", self._info),
                web.get("/api/jobs/{id}/logs/tail", self._tail),
                web.post("/api/jobs/{id}/stop", self._stop),
            ]
        )
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        # To the end: a request that is left pending would be thrown away in the midst of some later test, and Python
        # 3.11 cannot parse anything while that happens.
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.55.0", "ray_commit": "", "session_name": ""})

    async def _package(self, _request: web.Request) -> web.Response:
        return web.Response()  # it has been uploaded

    async def _submit(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        status, text = self.submissions.pop(0) if len(self.submissions) > 1 else self.submissions[0]
        if status == 200:
            return web.json_response({"job_id": "", "submission_id": self.asked[-1]["submission_id"]})
        return web.Response(status=status, text=text)

    async def _info(self, request: web.Request) -> web.Response:
        info = {"type": "SUBMISSION", "submission_id": request.match_info["id"], "entrypoint": "train"}
        return web.json_response({**info, "status": "FAILED", "driver_exit_code": 7})

    async def _tail(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        for number in range(12):
            if number == 5 and self.breaks:
                self.breaks -= 1
                request.transport.abort()
                return socket
            await socket.send_str(f"line {number}\n")
        return socket

    async def _stop(self, request: web.Request) -> web.Response:
        self.stopped.append(request.match_info["id"])
        return web.json_response({"stopped": True})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_job, "_POLL_S", 0.02)
    server = JobServer()
    yield server
    server.close()


def submit(address: str, folder: Path, *, start_timeout_s: float = 60.0) -> int:
    (folder / "code").mkdir(exist_ok=True)
    job = Job(
        command="train",
        runtime_env={"working_dir": str(folder / "code"), "excludes": ["x"], "env_vars": {"A": "1"}},
        resources={"entrypoint_num_cpus": 1.5},
        stop_wait_s=40,
        start_timeout_s=start_timeout_s,
        run_dir=folder,
    )
    return _Submission(address, job, SimpleNamespace(number=None, exit_code=143), "THE LOGS").run()


def test_a_submission_is_repeated_until_the_job_agent_is_up(
    server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.submissions = [NO_AGENT, NO_AGENT, TAKEN]
    assert submit(server.address, tmp_path) == 7
    assert [asked["entrypoint"] for asked in server.asked] == ["train"] * 3
    assert len({asked["submission_id"] for asked in server.asked}) == 1  # so that it cannot run twice
    assert all(asked["runtime_env"]["working_dir"].startswith("gcs://") for asked in server.asked)
    assert all(asked["entrypoint_num_cpus"] == 1.5 for asked in server.asked)
    assert capsys.readouterr().err.count("No available agent") == 1


def test_a_lost_answer_to_a_submission_is_no_second_job(server: JobServer, tmp_path: Path) -> None:
    server.submissions = [NO_AGENT, (500, "ValueError: Job with submission_id x already exists.")]
    assert submit(server.address, tmp_path) == 7
    assert len(server.asked) == 2


def test_a_cluster_that_takes_no_job_in_time_is_left_with_the_place_of_its_logs(
    server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.submissions = [NO_AGENT]
    assert submit(server.address, tmp_path, start_timeout_s=0.1) == EXIT_NOT_READY
    assert f"{server.address} took no job within 0.1 s; Ray's logs: THE LOGS" in capsys.readouterr().err
    assert server.stopped  # should the last request have arrived after all


def test_an_address_where_nothing_listens_is_given_up_in_time(
    server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Port 1 is privileged and unassigned.
    assert submit("http://127.0.0.1:1", tmp_path, start_timeout_s=0.1) == EXIT_NOT_READY
    assert "waiting for http://127.0.0.1:1: Failed to connect to Ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, "Unauthorized: Missing authentication token"), "wants a token"),
        ((403, "Forbidden: Invalid authentication token"), "wants a token"),
        ((413, "Request Entity Too Large"), "is more than Ray takes (100 MiB, packed)"),
        ((400, "bad runtime_env"), "refuses the job: Request failed with status code 400: bad runtime_env"),
    ],
)
def test_a_refusal_is_not_repeated(
    answer: tuple[int, str], message: str, server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.submissions = [answer]
    assert submit(server.address, tmp_path) == 2
    assert len(server.asked) == 1
    assert message in capsys.readouterr().err


def test_a_log_whose_connection_breaks_is_printed_once(
    server: JobServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.breaks = 2
    assert submit(server.address, tmp_path) == 7
    assert capsys.readouterr().out == "".join(f"line {number}\n" for number in range(12))


RUN_HERE = """
import sys
from pathlib import Path
from openrlhf_ext.adapters.ray_job import Job, run_here

folder = Path(sys.argv[1])
sys.executable = str(folder / "fake_python")
sys.exit(run_here(Job("train", {}, {}, 40, 60.0, folder / "run"), 2))
"""


@pytest.mark.parametrize(("last_words", "attempts"), [("no memory", 1), ("Failed to bind to 127.0.0.1:20000", 3)])
def test_a_head_that_does_not_start_is_reported_and_tried_again_only_for_its_port(
    last_words: str, attempts: int, tmp_path: Path
) -> None:
    fake = tmp_path / "fake_python"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho {last_words}\nexit 3\n')
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", RUN_HERE, str(tmp_path)],
        env={**os.environ, "RAY_TMPDIR": "/tmp", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == EXIT_HEAD_DIED, done.stderr
    assert f"Ray's head ended with 3 while it started:\n{last_words}" in done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == attempts
    (folder,) = {word.partition("=")[2] for word in calls[0].split() if word.startswith("--temp-dir=")}
    sizes = "--num-cpus=3 --num-gpus=2" if cpu_platform.active() else "--log-color=false"
    assert all(call.endswith(sizes) for call in calls)
    assert (tmp_path / "run/logs/ray_start.log").read_text() == f"{last_words}\n"
    assert not Path(folder).exists()


def test_ray_packs_what_is_not_excluded_and_nothing_else(tmp_path: Path) -> None:
    project = tmp_path / "project"
    kept = ["code/train.py", "code/run 2/notes.txt", "config.yaml", "environment.py"]
    left_out = [
        *(".env", ".env.local", "code/.env", ".git/config", ".venv/lib/x.py", "code/__pycache__/x.pyc", "key.pem"),
        *("runs/a/summary.json", "old/run [1]/metrics.jsonl", "old/run [1]/checkpoints/x.pt", "mine!/out.txt"),
        *("data.bin", ".pytest_cache/x", "ignored/x.txt"),
    ]
    for name in (*kept, *left_out):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    with open(project / "data.bin", "wb") as file:
        file.truncate(LARGEST_FILE + 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.txt").write_text("x")
    (project / "linked").symlink_to(tmp_path / "elsewhere")
    (project / ".gitignore").write_text("ignored/\n")

    package = tmp_path / "package.zip"
    excludes = excluded_paths(project, [project / "mine!"])
    create_package(str(project), package, include_gitignore=True, excludes=excludes, logger=logging.getLogger())

    with zipfile.ZipFile(package) as packed:
        names = {name for name in packed.namelist() if not name.endswith("/")}
    assert names == {*kept, ".gitignore"}


def test_the_start_hook_leaves_out_the_server_with_a_fixed_port() -> None:
    params = RayParams(ray_client_server_port=10001)
    no_client_server(params, True)
    assert params.ray_client_server_port is None
