"""slurm/submit: the sbatch line and the files of a job, and what is refused before that. Slurm is a stand-in."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.settings import Settings

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("slurm_submit", str(ROOT / "slurm" / "submit"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


submit = load()

# One GPU for the actor and one for the engine.
CONFIG = f"""
base: {ROOT}/configs/cpu/grpo.yaml
actor.model_name_or_path: ./model
data.prompt_dataset: ./train.jsonl
eval.dataset: null
eval.steps: -1
reward.remote_url: {ROOT}/openrlhf_ext/rewards/countdown.py
ext:
  run_dir: runs/first
  reward: {{deadline_s: 0}}
"""
ENOUGH = ["--time=1:00:00", "--gpus-per-node=2", "--cpus-per-task=4"]

# Notes its arguments and environment, and does what the test says.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "$0" "$@" >>"$CALLS"
printf '\\n' >>"$CALLS"
env -0 >"$CALLS.env"
"""


class Cluster:
    """A login node: the current folder with a configuration, and stand-ins for Slurm's commands."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder / "home", capsys
        self.run_dir = self.folder / "runs" / "first"
        self._programs, self._calls = folder / "programs", folder / "calls"
        self._programs.mkdir()
        (self.folder / "model").mkdir(parents=True)
        (self.folder / "model" / "config.json").write_text("{}")
        (self.folder / "model" / "model.safetensors").write_text("")
        (self.folder / "train.jsonl").write_text('{"input": "1 2", "label": "3"}\n')
        (self.folder / "c.yaml").write_text(CONFIG)
        monkeypatch.chdir(self.folder)
        monkeypatch.setenv("PATH", f"{self._programs}:/usr/bin:/bin")
        monkeypatch.setenv("CALLS", str(self._calls))
        for name in list(os.environ):
            if name.startswith("SLURM_"):
                monkeypatch.delenv(name)
        self.answers("sbatch", "echo 123")
        self.answers("squeue", "")

    def answers(self, command: str, text: str) -> None:
        (self._programs / command).write_text(STAND_IN + text + "\n")
        (self._programs / command).chmod(0o755)

    def calls(self) -> list[list[str]]:
        """Command lines that Slurm got so far."""
        lines = self._calls.read_text().split("\0\n")[:-1] if self._calls.exists() else []
        return [[Path(line.split("\0")[0]).name, *line.split("\0")[1:]] for line in lines]

    def environment(self) -> dict[str, str]:
        """Of the last of these."""
        entries = Path(f"{self._calls}.env").read_text().split("\0")[:-1]
        return dict(entry.split("=", 1) for entry in entries)

    def submit(self, *words: str, code: int = 0) -> tuple[str, str]:
        """What it prints to stdout and stderr. The configuration and enough resources come first."""
        return self.run(["--config", "c.yaml", *ENOUGH, *words], code)

    def run(self, words: list[str], code: int = 0) -> tuple[str, str]:
        assert submit.main(words) == code
        printed = self._capsys.readouterr()
        return printed.out, printed.err

    def refusal(self, *words: str) -> str:
        out, err = self.submit(*words, code=2)
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err[7:-1]

    def sbatch_line(self, *words: str) -> list[str]:
        return shlex.split(self.submit("--dry-run", *words)[0].splitlines()[-1])

    def job_env(self, name: str, *words: str) -> list[str]:
        """The words of a variable as bash reads them from job.env."""
        out, _ = self.submit("--dry-run", *words)
        text = out.rpartition("/job.env\n# ")[2].rpartition("\nsbatch ")[0]
        code = f'# {text}\n[ ${{#{name}[@]}} = 0 ] || printf "%s\\0" "${{{name}[@]}}"'
        done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    def tree(self) -> list[str]:
        return sorted(str(path) for path in self.folder.rglob("*"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, monkeypatch, capsys)


# -- what is printed --


def test_a_dry_run_prints_script_environment_and_command_line(cluster: Cluster) -> None:
    out, err = cluster.submit("--dry-run")
    folder = cluster.run_dir / "slurm"
    assert err == ""
    assert (
        out
        == f"""\
{(ROOT / "slurm" / "ray.sbatch").read_text("utf-8")}
# {folder}/job.env
# For slurm/ray.sbatch; written by slurm/submit.
# shellcheck shell=bash disable=SC2034
ROOT={ROOT}
BIN_DIR={Path(sys.executable).parent}
RUN_DIR={cluster.run_dir}
TRAIN=(python -m openrlhf_ext.cli.train_ppo_ray --config {folder}/config.yaml)
SEEDS=()
STOP_WAIT_S=50
RAY_GPUS_PER_NODE=
CONTAINER=none
CONTAINER_IMAGE=
CONTAINER_MOUNTS=
SETUP=
RAY_NIC=

sbatch --parsable --nodes=1 --gpus-per-node=2 --cpus-per-task=4 --time=1:00:00 --job-name=first --ntasks-per-node=1 \
--chdir={ROOT} --output={folder}/job-%j.out --export=ALL --requeue --open-mode=append --signal=B:USR1@300 \
{ROOT}/slurm/ray.sbatch {folder}/job.env
"""
    )


def test_a_dry_run_writes_nothing_and_does_not_ask_slurm(cluster: Cluster) -> None:
    before = cluster.tree()
    cluster.submit("--dry-run", "--array-seeds", "1,2")
    assert cluster.tree() == before and cluster.calls() == []


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("--nodes=3", "--nodes=3"),
        ("--gpus-per-node=a100:8", "--gpus-per-node=a100:8"),
        ("--gres=nvme:1", "--gres=nvme:1"),
        ("--cpus-per-task=16", "--cpus-per-task=16"),
        ("--mem=200G", "--mem=200G"),
        ("--mem=0", "--mem=0"),
        ("--time=2-12", "--time=2-12"),
        ("--partition=long", "--partition=long"),
        ("--account=ab12", "--account=ab12"),
        ("--qos=high", "--qos=high"),
        ("--constraint=[rack1|rack2]&h100", "--constraint=[rack1|rack2]&h100"),
        ("--nodelist=node[1-2,5]", "--nodelist=node[1-2,5]"),
        ("--exclude=node7", "--exclude=node7"),
        ("--reservation=course", "--reservation=course"),
        (
            "--dependency=afterok:12:13,afterany:14_2+5,singleton",
            "--dependency=afterok:12:13,afterany:14_2+5,singleton",
        ),
        ("--dependency=afterok:12", "--kill-on-invalid-dep=yes"),
        ("--mail-type=END,FAIL", "--mail-type=END,FAIL"),
        ("--mail-user=me@example.org", "--mail-user=me@example.org"),
        ("--job-name=mine", "--job-name=mine"),
        ("--exclusive", "--exclusive"),
        ("--signal-lead=600", "--signal=B:USR1@600"),
        ("--array-seeds=4,2,9", "--array=0-2"),
        ("--array-seeds=4,2,9%2", "--array=0-2%2"),
        ("--sbatch-arg=--comment=two words", "--comment=two words"),
        ("--sbatch-arg=--hold", "--hold"),
    ],
)
def test_an_option_is_passed_on_as_one_word_and_only_where_it_was_given(
    cluster: Cluster, given: str, passed: str
) -> None:
    line = cluster.sbatch_line(given)
    assert line.count(passed) == 1
    assert [word.partition("=")[0] for word in line].count(passed.partition("=")[0]) == 1


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        (["--array-seeds=4,2"], "SEEDS", ["4", "2"]),
        (["--max-restarts=0"], "MAX_RESTARTS", ["0"]),
        (["--ready-timeout=900"], "READY_TIMEOUT_S", ["900"]),
        (["--nic=ib0"], "RAY_NIC", ["ib0"]),
        (["--ray-tmp=/local/tmp"], "RAY_TMP_ROOT", ["/local/tmp"]),
        (["--", "--ext.stop_deadline_s", "100.5"], "STOP_WAIT_S", ["131"]),
        (["--", "--ext.resume", "never"], "MAX_RESTARTS", ["0"]),
        (["--container=pyxis", "--container-image=nvcr.io#nvidia/pytorch:26.03-py3"], "CONTAINER", ["pyxis"]),
        (["--container=apptainer", "--container-image=a b.sif"], "CONTAINER_IMAGE", ["a b.sif"]),
        (["--container=pyxis", "--container-image=i"], "BIN_DIR", [""]),
        (["--container=pyxis", "--container-image=i", "--venv=/opt/venv"], "BIN_DIR", ["/opt/venv/bin"]),
    ],
)
def test_an_option_of_the_job_is_in_its_environment(
    cluster: Cluster, given: list[str], name: str, words: list[str]
) -> None:
    assert cluster.job_env(name, *given) == words


def test_the_setup_file_and_the_environment_are_given_by_absolute_paths(cluster: Cluster) -> None:
    (cluster.folder / "modules.sh").write_text("module load cuda\n")
    for program in ("python", "ray"):
        (cluster.folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        (cluster.folder / "venv" / "bin" / program).write_text("#!/bin/sh\n")
        (cluster.folder / "venv" / "bin" / program).chmod(0o755)
    assert cluster.job_env("SETUP", "--setup=modules.sh") == [str(cluster.folder / "modules.sh")]
    assert cluster.job_env("BIN_DIR", "--venv=venv") == [str(cluster.folder / "venv" / "bin")]


def test_ray_can_be_given_gpus_that_slurm_does_not_know(cluster: Cluster) -> None:
    words = ["--config", "c.yaml", "--time=60", "--cpus-per-task=2", "--nodes=2", "--ray-gpus-per-node=1", "--dry-run"]
    out, _ = cluster.run(words)
    assert "\nRAY_GPUS_PER_NODE=1\n" in out and "gpus-per-node=" not in out.splitlines()[-1]


def test_the_seeds_of_an_array_find_their_settings_in_a_container(cluster: Cluster) -> None:
    given = ["--container=pyxis", "--container-image=i", "--container-mounts=/data:/data:ro,/m:/n"]
    assert cluster.job_env("CONTAINER_MOUNTS", *given) == ["/data:/data:ro,/m:/n"]
    both = f"/data:/data:ro,/m:/n,{cluster.run_dir}:{cluster.run_dir}"
    assert cluster.job_env("CONTAINER_MOUNTS", *given, "--array-seeds=1,2") == [both]


AWKWARD = ["two words", "it's", 'a "quote"', "$HOME `id` $(id)", "a,b;c&d|e>f", "*?[1]", "50%j", "-dash", "ünï"]


@pytest.mark.parametrize("value", AWKWARD)
def test_awkward_values_arrive_as_they_are(cluster: Cluster, value: str) -> None:
    run_dir = cluster.folder / value
    words = [f"--job-name={value}", f"--constraint={value}", "--", "--ext.run_dir", str(run_dir)]
    line = cluster.sbatch_line(*words)
    assert f"--job-name={value}" in line and f"--constraint={value}" in line
    assert line[-1] == f"{run_dir}/slurm/job.env"
    assert f"--output={str(run_dir).replace('%', '%%')}/slurm/job-%j.out" in line  # Slurm's own escape
    assert cluster.job_env("RUN_DIR", *words) == [str(run_dir)]
    assert cluster.job_env("TRAIN", *words)[-1] == f"{run_dir}/slurm/config.yaml"


def test_what_is_printed_is_sound_bash(cluster: Cluster) -> None:
    words = [f"--job-name={AWKWARD[3]}", "--array-seeds=1,2", "--", "--ext.run_dir", AWKWARD[2]]
    out, _ = cluster.submit("--dry-run", *words)
    assert subprocess.run(["bash", "-n"], input=out, text=True, stderr=subprocess.PIPE).stderr == ""
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("there is no shellcheck here")
    cluster.submit(*words)
    env = cluster.folder / AWKWARD[2] / "slurm" / "job.env"
    done = subprocess.run([shellcheck, str(env)], text=True, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, "")


# -- the settings of the job --


def same(one: Settings, other: Settings) -> bool:
    return (one.flat, one.ext) == (other.flat, other.ext)


def trained(cluster: Cluster, *words: str) -> Settings:
    """The settings that ray.sbatch's command has, wherever it is run."""
    train = cluster.job_env("TRAIN", *words)
    settings = checked_settings([*train[3:], "--ext.run_dir", *cluster.job_env("RUN_DIR", *words)])
    assert train[:3] == ["python", "-m", "openrlhf_ext.cli.train_ppo_ray"] and settings is not None
    return settings


def test_the_job_trains_the_settings_that_were_checked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--data.input_template", "line\n'{}'", "--ext.run_dir", "runs/a b", "--ext.dapo.max_rounds", "4"]
    wanted = checked_settings(["--config", "c.yaml", "--ext.resume", "auto", *flags])
    cluster.submit("--", *flags)
    (cluster.folder / "c.yaml").write_text(CONFIG.replace("train.jsonl", "gone.jsonl"))
    monkeypatch.chdir("/")
    settings = checked_settings(
        ["--config", f"{cluster.folder}/runs/a b/slurm/config.yaml", "--ext.run_dir", f"{cluster.folder}/runs/a b"]
    )
    assert wanted is not None and settings is not None and same(settings, wanted)
    assert settings.ext.resume == "auto" and settings.flat["data.prompt_dataset"] == f"{cluster.folder}/train.jsonl"


def test_each_seed_of_an_array_has_its_own_checkpoints_and_model(cluster: Cluster) -> None:
    cluster.submit("--array-seeds=1,2")
    config, run_dir = str(cluster.run_dir / "slurm" / "config.yaml"), cluster.run_dir / "seed-2"
    settings = checked_settings(["--config", config, "--ext.run_dir", str(run_dir), "--train.seed", "2"])
    assert settings is not None
    assert settings.flat["ckpt.path"] == str(run_dir / "checkpoints")
    assert settings.flat["ckpt.output_dir"] == str(run_dir / "model")


def test_a_folder_of_checkpoints_that_was_given_is_kept(cluster: Cluster) -> None:
    cluster.submit("--", "--ckpt.path", "elsewhere")
    settings = checked_settings(["--config", str(cluster.run_dir / "slurm" / "config.yaml")])
    assert settings is not None and settings.flat["ckpt.path"] == str(cluster.folder / "elsewhere")


# -- submission --


def test_a_submission_writes_the_files_and_says_where_to_look(cluster: Cluster) -> None:
    out, err = cluster.submit("--", "--train.seed", "3")
    folder = cluster.run_dir / "slurm"
    assert (out, err) == (
        f"""\
job   123
look  squeue -j 123
log   {folder}/job-123.out
stop  {ROOT}/slurm/stop --no-requeue 123   (after the step, saved, in 20 s at most)
""",
        "",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "job.env", "job.sbatch", "jobs"]
    assert (folder / "job.sbatch").read_bytes() == (ROOT / "slurm" / "ray.sbatch").read_bytes()
    assert "train.seed: 3\n" in (folder / "config.yaml").read_text()


def test_what_is_run_is_what_the_dry_run_prints(cluster: Cluster) -> None:
    words = ["--job-name", "two words", "--array-seeds=1,2", "--sbatch-arg=--comment=$x"]
    printed, _ = cluster.submit("--dry-run", *words)
    cluster.submit(*words)
    assert cluster.calls() == [shlex.split(printed.splitlines()[-1])]
    env = (cluster.run_dir / "slurm" / "job.env").read_text()
    assert printed.endswith(f"/job.env\n{env}\n{printed.splitlines()[-1]}\n")
    assert (cluster.run_dir / "slurm" / "jobs").read_text() == f"123 {printed.splitlines()[-1]}\n"


def test_secrets_travel_in_the_environment_and_the_outer_job_does_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    out, err = cluster.submit()
    environment = cluster.environment()
    assert environment["WANDB_API_KEY"] == "s3cret" and environment["SLURM_CONF"] == "/etc/other.conf"
    assert "SLURM_RESTART_COUNT" not in environment
    files = [path.read_text() for path in (cluster.run_dir / "slurm").iterdir()]
    assert not any("s3cret" in text for text in [out, err, *files, *cluster.calls()[0]])


def test_a_job_on_another_cluster_is_looked_at_and_stopped_there(cluster: Cluster) -> None:
    cluster.answers("sbatch", "echo '123;big'")
    out, _ = cluster.submit("--sbatch-arg=--clusters=big")
    assert "job   123 on big\nlook  squeue -M big -j 123\n" in out
    assert "stop  scancel -M big -b -s USR2 123 " in out


def test_an_array_has_a_log_for_each_task(cluster: Cluster) -> None:
    assert f"log   {cluster.run_dir}/slurm/job-123_*.out\n" in cluster.submit("--array-seeds=1,2")[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "echo 'sbatch: error: invalid partition: x' >&2; exit 1",
            "sbatch gave no job (exit code 1): sbatch: error: invalid partition: x",
        ),
        ("echo hello", "sbatch gave no job (exit code 0): hello"),
    ],
)
def test_a_refusal_by_slurm_is_passed_on(cluster: Cluster, answer: str, message: str) -> None:
    cluster.answers("sbatch", answer)
    assert cluster.submit(code=1) == ("", f"error: {message}\n")
    assert not (cluster.run_dir / "slurm" / "jobs").exists()


def test_what_slurm_says_beside_the_job_id_is_shown(cluster: Cluster) -> None:
    cluster.answers("sbatch", "echo 'sbatch: your account ends tomorrow' >&2; echo 123")
    assert cluster.submit()[1] == "sbatch: your account ends tomorrow\n"


def test_without_slurm_the_machine_is_named_as_the_problem(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cluster.folder))
    assert cluster.refusal() == "there is no sbatch here; submit from a login node of the cluster"


def test_a_check_asks_slurm_and_writes_nothing(cluster: Cluster) -> None:
    line, before = cluster.sbatch_line("--nodes=2"), cluster.tree()
    cluster.answers("sbatch", "echo 'sbatch: Job 7 to start at noon' >&2")
    assert cluster.submit("--check", "--nodes=2") == ("sbatch: Job 7 to start at noon\n", "")
    assert cluster.calls() == [["sbatch", "--test-only", *line[2:]]]
    cluster.answers("sbatch", "echo 'allocation failure: Invalid account' >&2; exit 1")
    assert cluster.submit("--check", code=1) == ("allocation failure: Invalid account\n", "")
    assert cluster.tree() == before


# -- one run directory, one job at a time --


def test_a_run_directory_whose_job_waits_or_runs_is_refused(cluster: Cluster) -> None:
    cluster.submit()
    cluster.answers("squeue", "echo '123 first'")
    assert cluster.refusal() == (
        "job 123 has this run directory, see squeue -j 123; stop it by slurm/stop --no-requeue 123, give another "
        "--ext.run_dir, or --dependency afterany:123 to go on after it"
    )
    assert [call[0] for call in cluster.calls()] == ["sbatch", "squeue"]
    cluster.submit("--", "--ext.run_dir", "runs/other")


def test_a_run_directory_whose_job_is_gone_can_be_used(cluster: Cluster) -> None:
    cluster.submit()
    cluster.answers("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    cluster.submit()
    assert [line.split()[0] for line in (cluster.run_dir / "slurm" / "jobs").read_text().splitlines()] == ["123"] * 2


def test_a_job_of_an_array_counts_for_the_whole(cluster: Cluster) -> None:
    cluster.submit("--array-seeds=1,2")
    cluster.answers("squeue", "echo '123 first'; echo '123 first'")
    assert cluster.refusal("--array-seeds=3").startswith("job 123 has this run directory")


def test_an_unanswered_question_is_not_taken_for_no_job(cluster: Cluster) -> None:
    cluster.submit()
    cluster.answers("squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert cluster.refusal() == (
        "squeue cannot say whether jobs of this run directory are still there: squeue: error: Unable to contact slurm "
        f"controller; try again, or remove {cluster.run_dir}/slurm/jobs if there are none"
    )


def test_jobs_are_looked_for_on_the_cluster_that_has_them(cluster: Cluster) -> None:
    cluster.answers("sbatch", "echo '123;big'")
    cluster.submit()
    cluster.submit()
    assert cluster.calls()[1] == ["squeue", "--clusters=big", "--noheader", "--jobs=123", "--format=%F %j"]


@pytest.mark.parametrize(
    ("dependency", "taken"),
    [
        ("afterany:123", True),
        ("afternotok:123", True),
        ("afterok:7:123", True),
        ("afterok:7,afterany:123+10", True),
        ("singleton", True),
        ("after:123", False),
        ("afterany:7", False),
        ("afterany:7?afterany:123", False),
        ("afterany:123_1", False),
    ],
)
def test_a_job_that_waits_for_the_one_before_goes_on_after_it(cluster: Cluster, dependency: str, taken: bool) -> None:
    cluster.submit()
    cluster.answers("squeue", "echo '123 first'")
    cluster.submit(f"--dependency={dependency}", code=0 if taken else 2)


def test_a_singleton_waits_only_for_jobs_of_its_name(cluster: Cluster) -> None:
    cluster.submit("--job-name=other")
    cluster.answers("squeue", "echo '123 other'")
    assert cluster.refusal("--dependency=singleton").startswith("job 123 has this run directory")


@pytest.mark.parametrize(
    ("words", "file"), [(["--max-restarts=1"], "job.env"), (["--", "--train.seed=2"], "config.yaml")]
)
def test_the_files_of_a_job_that_may_start_again_do_not_change(cluster: Cluster, words: list[str], file: str) -> None:
    cluster.submit()
    cluster.answers("squeue", "echo '123 first'")
    assert cluster.refusal("--dependency=afterany:123", *words) == (
        f"{cluster.run_dir}/slurm/{file} would change under job 123, which reads it when it starts again; give the "
        "same settings and options as for that job, or another --ext.run_dir"
    )


def finish(run_dir: Path, file: str = "summary.json") -> None:
    run_dir.mkdir(parents=True)
    (run_dir / file).write_text("{}\n")


def test_a_finished_run_is_not_run_again(cluster: Cluster) -> None:
    finish(cluster.run_dir)
    assert cluster.refusal("--dry-run") == (
        f"a finished run is in {cluster.run_dir}; give another --ext.run_dir, or remove its summary.json to go on "
        "from its last checkpoint for more steps"
    )


def test_finished_seeds_of_an_array_are_named(cluster: Cluster) -> None:
    for seed in (2, 3, 5):
        finish(cluster.run_dir / f"seed-{seed}")
    message = cluster.refusal("--array-seeds=1,2,3,4")
    assert message.startswith(f"a finished run is in {cluster.run_dir}/seed-2, {cluster.run_dir}/seed-3; ")
    cluster.submit("--array-seeds=1,4")


def test_a_run_that_was_interrupted_goes_on_unless_it_may_not(cluster: Cluster) -> None:
    finish(cluster.run_dir / "seed-1", "metrics.jsonl")
    cluster.submit("--array-seeds=1")
    assert cluster.refusal("--array-seeds=1", "--", "--ext.resume=never") == (
        f"with --ext.resume never, a run is already in {cluster.run_dir}/seed-1; give another --ext.run_dir or other "
        "seeds, or --ext.resume auto to go on with it"
    )


# -- what is refused --

ALONE = ["--config=c.yaml", "--time=60", "--cpus-per-task=4"]
MORE = (
    "give more of --nodes, --cpus-per-task and --gpus-per-node or --gres gpu:N (--ray-gpus-per-node without GRES, and "
    "for the CPU stack), or change the flag"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: --config, --time"),
        (["--config=no.yaml", "--time=60"], "argument --config: there is no file {home}/no.yaml"),
        ([*ALONE, "--nodes=0"], "argument --nodes: must be a whole number of at least 1, got '0'"),
        ([*ALONE, "--nodes=2-4"], "argument --nodes: must be a whole number of at least 1, got '2-4'"),
        ([*ALONE, "--gpu=2"], "unrecognized arguments: --gpu=2"),
        ([*ALONE, "--gpus-per-node=8,8"], "argument --gpus-per-node: must be a number, or TYPE:NUMBER, got '8,8'"),
        ([*ALONE, "--gres=gpu 8"], "argument --gres: must be NAME[:TYPE][:COUNT],..., got 'gpu 8'"),
        (
            [*ALONE, "--mem=8GB"],
            "argument --mem: must be a number with K, M, G or T, or 0 for the whole node, got '8GB'",
        ),
        (
            ["--config=c.yaml", "--time=1h"],
            "argument --time: must be minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes "
            "or days-hours:minutes:seconds, got '1h'",
        ),
        (
            [*ALONE, "--dependency=12"],
            "argument --dependency: must be Slurm's list, as in afterok:12 or afterany:12,singleton, got '12'",
        ),
        ([*ALONE, "--array-seeds=1,1"], "argument --array-seeds: must be different seeds such as 1,2,3, got '1,1'"),
        ([*ALONE, "--array-seeds=1-3"], "argument --array-seeds: must be different seeds such as 1,2,3, got '1-3'"),
        ([*ALONE, "--array-seeds=1%0"], "argument --array-seeds: must be a whole number of at least 1, got '0'"),
        ([*ALONE, "--max-restarts=-1"], "argument --max-restarts: must be a whole number of at least 0, got '-1'"),
        ([*ALONE, "--nic=eth0;ls"], "argument --nic: must be an interface's name, got 'eth0;ls'"),
        (
            [*ALONE, "--ray-tmp=/scratch/local/of/this/node"],
            "argument --ray-tmp: must be an absolute path of at most 24 characters, got '/scratch/local/of/this/node'",
        ),
        ([*ALONE, "--setup=no.sh"], "argument --setup: there is no file {home}/no.sh"),
        (
            [*ALONE, "--sbatch-arg=other.sbatch"],
            "argument --sbatch-arg: must be --NAME or --NAME=VALUE, in one word, got 'other.sbatch'",
        ),
        (
            [*ALONE, "--container=pyxis", "--container-image=i", "--container-mounts=data:/data"],
            "argument --container-mounts: must be /SRC:/DST,..., got 'data:/data'",
        ),
        (
            [*ALONE, "--gpus-per-node=2", "--gres=gpu:2"],
            "--gpus-per-node and --gres gpu are the same; remove one of them",
        ),
        (
            [*ALONE, "--gpus-per-node=2", "--ray-gpus-per-node=2"],
            "--ray-gpus-per-node is for nodes whose GPUs Slurm does not give; remove it, or --gpus-per-node and "
            "--gres gpu",
        ),
        (
            [*ALONE, "--array-seeds=1,2", "--dependency=singleton"],
            "--dependency singleton lets the tasks of --array-seeds wait for each other; remove it, or give the seeds "
            "as --array-seeds 1,2,3%1 to run one at a time",
        ),
        ([*ALONE, "--container=pyxis"], "--container and --container-image belong together; give both or neither"),
        ([*ALONE, "--container-mounts=/d:/d"], "--container-mounts needs --container and --container-image"),
        (
            ["--config=c.yaml", "--time=5:59"],
            "--time 5:59 is 359 s, --signal-lead 300 s before its end the run is stopped and saved, and at least 60 s "
            "are for training; give more time, or a shorter lead",
        ),
        (
            [*ALONE, "--", "--ext.stop_deadline_s=240.5"],
            "--signal-lead 300 is too short to end a step, save and requeue: --ext.stop_deadline_s 240.5 and 90 s for "
            "the rest; give at least 331",
        ),
        (
            [*ALONE, "--max-restarts=2", "--", "--ext.resume", "never"],
            "--max-restarts 2 would start the run again from nothing, which --ext.resume never refuses; remove one of "
            "them",
        ),
        (
            [*ALONE, "--", "--config=c.yaml"],
            "--config after `--` is no flag of a training; give it before, or remove it",
        ),
        ([*ALONE, "--", "--help"], "--help after `--` is no flag of a training; give it before, or remove it"),
        (
            [*ALONE, "--array-seeds=1,2", "--", "--train.seed", "3"],
            "--train.seed and --array-seeds both give the seed; remove one of them",
        ),
        (
            [*ALONE, "--array-seeds=1,2", "--", "--ckpt.path", "same"],
            "--ckpt.path {home}/same would be shared by all of --array-seeds; remove it: each has its own under its "
            "run directory",
        ),
        (
            [*ALONE, "--", "--logger.wandb.key", "k"],
            "--logger.wandb.key is secret, and so not in the job's files; remove it and export WANDB_API_KEY, which "
            "travels with the job",
        ),
        (
            [*ALONE, "--", "--ext.run_dir", "a\nb"],
            "--ext.run_dir '{home}/a\\nb': Slurm takes no log file with such a name; use another folder",
        ),
        (
            [*ALONE, "--", "--ckpt.disable_ds"],
            "--ext.resume auto goes on from checkpoints that --ckpt.disable_ds does not write; remove one of the two "
            "(slurm/submit gives --ext.resume auto; for a job that never goes on: -- --ext.resume never)",
        ),
        (
            [*ALONE, "--", "--train.async_enable"],
            "--train.async_enable is not supported: the extensions need the synchronous trainer; remove the flag",
        ),
        (
            ALONE,
            "--actor.num_nodes 1 --actor.num_gpus_per_node 1 needs 1 x 1 GPUs, and there is room for 0 x 1 on --nodes "
            f"1 with 0 GPUs and 4 CPUs each; {MORE}",
        ),
        (
            [*ALONE, "--nodes=3", "--gres=nvme:4,gpu:a100:1", "--", "--vllm.num_engines=3"],
            "the run needs 4 GPUs, 1 (--actor.num_nodes 1 --actor.num_gpus_per_node 1) + 3 (--vllm.num_engines 3 "
            "--vllm.tensor_parallel_size 1), and there is room for 3 on --nodes 3 with 1 GPUs and 4 CPUs each; "
            + MORE,
        ),
        (
            [*ALONE, "--nodes=3", "--gpus-per-node=a100:1", "--", "--vllm.tensor_parallel_size=2"],
            "--vllm.num_engines 1 --vllm.tensor_parallel_size 2 needs 1 x 2 GPUs, each 2 on one node, and there is "
            f"room for 0 x 2 on --nodes 3 with 1 GPUs and 4 CPUs each; {MORE}",
        ),
        (
            ["--config=c.yaml", "--time=60", "--gpus-per-node=2", "--cpus-per-task=1"],
            "the run needs 2 GPUs, 1 (--actor.num_nodes 1 --actor.num_gpus_per_node 1) + 1 (--vllm.num_engines 1 "
            "--vllm.tensor_parallel_size 1), and there is room for 1 on --nodes 1 with 2 GPUs and 1 CPUs each; "
            + MORE,
        ),
        (
            ["--config=c.yaml", "--time=60", "--gpus-per-node=1", "--exclusive"],
            "the run needs 2 GPUs, 1 (--actor.num_nodes 1 --actor.num_gpus_per_node 1) + 1 (--vllm.num_engines 1 "
            "--vllm.tensor_parallel_size 1), and there is room for 1 on --nodes 1 with 1 GPUs each; " + MORE,
        ),
        (
            ["--config=c.yaml", "--time=60", "--gpus-per-node=2"],
            "--cpus-per-task is missing: without it or --exclusive a node gives one CPU",
        ),
        (
            [*ALONE, "--gpus-per-node=2", "--venv=model"],
            "{home}/model/bin has no python and no ray; give the environment that trains as --venv DIR",
        ),
        (
            [*ALONE, "--gpus-per-node=2", "--container=pyxis", "--container-image=i", "--", "--ext.run_dir=a,b"],
            "{home}/a,b cannot be mounted into a container, for its comma or colon; use another folder",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(cluster: Cluster, words: list[str], message: str) -> None:
    before = cluster.tree()
    assert cluster.run(words, code=2) == ("", f"error: {message.format(home=cluster.folder)}\n")
    assert cluster.tree() == before and cluster.calls() == []


TEXTS = "partition account qos constraint nodelist exclude reservation mail-type mail-user job-name".split()


@pytest.mark.parametrize("option", [*TEXTS, "container-image", "venv"])
@pytest.mark.parametrize("value", ["two\nlines", "", "tab\there"])
def test_a_value_is_one_line_of_text(cluster: Cluster, option: str, value: str) -> None:
    message = f"argument --{option}: must be text without line breaks or control characters, got {value!r}"
    assert cluster.refusal(f"--{option}={value}") == message


@pytest.mark.parametrize(
    ("word", "way_out"),
    [
        ("--nodes=3", "give it as slurm/submit's own option --nodes"),
        ("--nod=3", "give it as slurm/submit's own option --nodes"),
        ("--gpus=8", "give it as slurm/submit's own option --gpus-per-node"),
        ("--exclusive", "give it as slurm/submit's own option --exclusive"),
        ("--array=0-3", "give it as slurm/submit's own option --array-seeds"),
        ("--no-requeue", "give it as slurm/submit's own option --max-restarts 0"),
        ("--test-only", "give it as slurm/submit's own option --check"),
        ("--signal=USR2", "give it as slurm/submit's own option --signal-lead"),
        ("--output=x", "ray.sbatch relies on slurm/submit's choice of this; remove it"),
        ("--export=NONE", "ray.sbatch relies on slurm/submit's choice of this; remove it"),
        ("--ntasks=2", "ray.sbatch relies on slurm/submit's choice of this; remove it"),
        ("--wrap=ls", "ray.sbatch relies on slurm/submit's choice of this; remove it"),
    ],
)
def test_a_raw_argument_cannot_contradict_the_rest(cluster: Cluster, word: str, way_out: str) -> None:
    assert cluster.refusal(f"--sbatch-arg={word}") == f"--sbatch-arg {word}: {way_out}"


def test_cpus_can_be_given_for_each_gpu_or_with_whole_nodes(cluster: Cluster) -> None:
    words = ["--config=c.yaml", "--time=60", "--gpus-per-node=2", "--dry-run"]
    cluster.run([*words, "--exclusive"])
    cluster.run([*words, "--sbatch-arg=--cpus-per-gpu=4"])


def test_a_bad_prompt_file_and_a_bad_reward_file_are_found_before_the_queue(cluster: Cluster) -> None:
    (cluster.folder / "train.jsonl").write_text('{"input": "1 2"}\n')
    assert f"{cluster.folder}/train.jsonl:1: 'label'" in cluster.submit(code=2)[1]
    (cluster.folder / "train.jsonl").write_text('{"input": "1 2", "label": "3"}\n')
    (cluster.folder / "reward.py").write_text("import nothing_of_this_name\n")
    bad = ["--", "--reward.remote_url=./reward.py", "--ext.reward.deadline_s=10"]
    assert "nothing_of_this_name" in cluster.refusal(*bad)
    # What a container has is not known here.
    cluster.submit("--container=pyxis", "--container-image=i", *bad)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:05", 5405),
        ("2-0", 172800),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-2:30:05", 95405),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert submit._in_seconds(time) == seconds


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [(None, 0), ("gpu", 1), ("gpu:4", 4), ("gpu:a100", 1), ("gpu:a100:4,nvme:2,gpu:v100:2", 6), ("gpu2:3", 0)],
)
def test_gpus_are_counted_in_a_list_of_resources(gres: str | None, gpus: int) -> None:
    assert submit._gpus_of(gres) == gpus


# -- the Python that runs it --


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["-I", "-S"], "", "; run slurm/submit with the Python of the environment that trains"),
        ([], "sys.version_info = (3, 9, 1); ", "slurm/submit needs Python 3.10 or newer"),
    ],
)
def test_a_python_that_cannot_run_it_is_told_so_in_one_line(options: list[str], code: str, message: str) -> None:
    code = f"import runpy, sys; {code}runpy.run_path({str(ROOT / 'slurm' / 'submit')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ") and message in done.stderr


def test_an_old_python_gets_as_far_as_saying_so() -> None:
    source = (ROOT / "slurm" / "submit").read_text("utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "__future__ import annotations" not in source  # a SyntaxError in Python 3.6


def test_help_says_what_is_needed_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        submit.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  --{name}" in out for name in [*submit._FOR_SLURM, "config", "dry-run", "array-seeds", "sbatch-arg"])
