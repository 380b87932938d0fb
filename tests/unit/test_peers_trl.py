import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from openrlhf_ext.benchmark.outcomes import read_outcome
from openrlhf_ext.run_dir import RunDirectory, read_metrics
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

ROOT = Path(__file__).parents[2]
END = 1


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers_trl", ROOT / "scripts" / "peers_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Words:
    """A tokenizer whose tokens are words; 1 is the end of a response."""

    words = ("<pad>", "<eos>", "3+4", "4*3", "9")

    def batch_decode(self, rows):
        return ["".join(self.words[token] for token in row) for row in rows]


def prompt(number: int, target: int) -> Prompt:
    return Prompt(f"p{number}", f"3 4 {target}=", json.dumps({"numbers": [3, 4], "target": target}))


def group(number: int, rewards: list[float]) -> RolloutGroup[str]:
    rollouts = tuple(Rollout(reward, reward, 5, "3+4") for reward in rewards)
    return RolloutGroup(f"g{number}", prompt(number, 7), rollouts, 0)


@pytest.fixture
def arguments(tmp_path):
    """Of a run that could start, but for TRL."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    row = {"input": "3 4 7=", "label": '{"numbers": [3, 4], "target": 7}'}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return {
        "--trainer": "grpo",
        "--model": str(tmp_path / "model"),
        "--train": str(tmp_path / "rows.jsonl"),
        "--eval": str(tmp_path / "rows.jsonl"),
        "--lr": "1e-4",
        "--seed": "1",
        "--rollouts": "12800",
        "--out": str(tmp_path / "run"),
    }


def refusal(peers, arguments, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        peers.main([word for pair in arguments.items() for word in pair])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


@pytest.mark.parametrize(
    ("flag", "value", "part"),
    [
        ("--lr", "0", "--lr must be between 0 and 1, got 0"),
        ("--lr", "nan", "--lr must be between 0 and 1, got nan"),
        ("--rollouts", "1000", "--rollouts must be a multiple of 128"),
        ("--rollouts", "0", "--rollouts must be a multiple of 128"),
        ("--model", "nowhere", "--model nowhere holds no config.json"),
        ("--train", "nowhere.jsonl", "cannot read the prompt file nowhere.jsonl"),
    ],
)
def test_bad_input_is_refused_in_one_line(peers, arguments, capsys, flag, value, part):
    error = refusal(peers, arguments | {flag: value}, capsys)
    assert part in error
    assert error.count("\n") == 1
    assert not Path(arguments["--out"]).exists()


def test_a_run_is_not_added_to_another(peers, arguments, capsys):
    RunDirectory(arguments["--out"]).log("eval", 0, {})
    assert "is not empty" in refusal(peers, arguments, capsys)


def test_without_trl_the_way_to_get_it_is_named(peers, arguments, capsys, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert "scripts/benchmark_peers.sh" in refusal(peers, arguments, capsys)


def test_a_run_that_breaks_off_says_why(peers, arguments, monkeypatch):
    def breaks(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peers, "train", breaks)
    with pytest.raises(RuntimeError):
        peers.main([word for pair in arguments.items() for word in pair])
    assert json.loads((Path(arguments["--out"]) / "failed.json").read_text()) == {"error": "RuntimeError: no luck"}


def test_evaluations_are_at_the_suite_s_rollouts_and_at_the_end(peers):
    assert peers.evaluation_steps(12800) == set(range(0, 101, 10))
    assert peers.evaluation_steps(3200) == {0, 10, 20, 25}
    assert peers.evaluation_steps(128) == {0, 1}


def test_the_settings_are_those_of_the_suite_s_grpo(peers):
    ours = yaml.safe_load((ROOT / "configs" / "cpu" / "grpo.yaml").read_text())
    theirs = peers.trl_settings(lr=1e-4, rollouts=12800)
    same = {
        "num_generations": "rollout.n_samples_per_prompt",
        "per_device_train_batch_size": "train.batch_size",
        "max_completion_length": "rollout.max_new_tokens",
        "beta": "algo.kl.init_coef",
        "delta": "actor.dual_clip",
        "lr_scheduler_type": "actor.lr_scheduler",
        "temperature": "eval.temperature",
    }
    assert {name: theirs[name] for name in same} == {name: ours[flag] for name, flag in same.items()}
    assert [theirs["epsilon"], theirs["epsilon_high"]] == ours["actor.eps_clip_low_high"]
    assert ours["rollout.batch_size"] == peers.NUM_PROMPTS
    assert theirs["max_steps"] == 100


def test_a_response_ends_with_its_first_end_token(peers):
    assert peers.until_end([5, END, 6, END], END) == [5, END]
    assert peers.until_end([5, 6], END) == [5, 6]


def test_every_response_is_graded_against_its_own_prompt(peers):
    prompts = [prompt(0, 7), prompt(1, 12)]
    responses = [[2, END], [3, END], [3, END], [4, 2, END]]
    first, second = peers.verified_groups(prompts, responses, Words(), version=3)
    assert (first.rewards(), second.rewards()) == ([1.0, 0.0], [1.0, 0.0])
    assert [rollout.num_tokens for rollout in second.rollouts] == [2, 3]
    assert [rollout.payload for rollout in second.rollouts] == ["4*3", "93+4"]
    assert (first.prompt, second.policy_version) == (prompts[0], 3)
    assert first.group_id != second.group_id


@pytest.fixture
def recorded(peers, tmp_path):
    """Two steps of two groups of two; the second step replays one group."""
    recorder = peers.Recorder(RunDirectory(str(tmp_path)), method="trl_replay", seed=1, started=0.0)
    recorder.started_up()
    recorder.evaluated(0, [group(0, [0.0, 1.0]), group(1, [0.0, 0.0])], {})
    recorder.generated([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])])
    recorder.trained(1, {"train/actor_grad_norm": 0.5}, num_replayed=0)
    recorder.generated([group(0, [0.0, 0.0]), group(1, [0.0, 0.0])])
    recorder.trained(2, {"train/actor_grad_norm": 1.5}, num_replayed=1)
    recorder.evaluated(2, [group(0, [1.0, 1.0]), group(1, [0.0, 1.0])], {})
    recorder.finish(2)
    return tmp_path


def test_a_train_line_says_what_its_step_generated_and_trained(recorded):
    first, second = read_metrics(recorded, "train")
    assert [row["budget/rollouts_generated"] for row in (first, second)] == [4, 8]
    assert [row["budget/tokens_generated"] for row in (first, second)] == [20, 40]
    assert [row["groups/effective_frac_generated"] for row in (first, second)] == [0.5, 0.0]
    assert first["step/num_gradient_rollouts"] == 2
    assert (first["rows/share_fresh"], second["rows/share_replayed"]) == (1.0, 0.5)


def test_what_a_replaying_step_trained_is_not_invented(recorded):
    second = read_metrics(recorded, "train")[1]
    assert "step/num_gradient_rollouts" not in second
    assert "groups/effective_frac_trained" not in second


def test_evaluations_are_no_train_time_and_no_budget(recorded):
    rows = read_metrics(recorded)
    assert [row["kind"] for row in rows] == ["eval", "train", "train", "eval"]
    steps = [row["timing/step_total"] for row in rows if row["kind"] == "train"]
    assert [row["train_wall_s"] for row in rows] == pytest.approx([0, steps[0], sum(steps), sum(steps)])
    assert [row["budget/rollouts_generated"] for row in rows] == [0, 4, 8, 8]


def test_the_run_directory_is_read_like_any_other(recorded):
    outcome = read_outcome(recorded)
    assert [(point.rollouts, point.accuracy) for point in outcome.curve] == [(0, 0.25), (8, 0.75)]
    assert outcome.figures["accuracy_gain"] == 0.5
    assert outcome.figures["grad_norm"] == 1.0
    assert outcome.figures["share_replayed"] == 0.25
    summary = json.loads((recorded / "summary.json").read_text())
    assert (summary["method"], summary["steps"], summary["tokens_generated"]) == ("trl_replay", 2, 40)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)


def test_samples_are_the_first_rollouts_of_a_step(recorded):
    samples = [json.loads(line) for line in (recorded / "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], sample["group_id"]) for sample in samples] == [(1, "g0"), (1, "g1"), (2, "g0"), (2, "g1")]
    assert [sample["reward"] for sample in samples] == [1.0, 1.0, 0.0, 0.0]


# Stands in for Python: its environment is a copy of itself, and it "trains" all but the replay runs of seed 2.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *peers_trl.py*"--trainer replay"*"--seed 2 "*) echo "RuntimeError: no luck" >&2 && exit 1 ;;
    *peers_trl.py*) mkdir "${@: -1}" && echo {} >"${@: -1}/summary.json" ;;
esac
"""


class Checkout:
    """A copy of benchmark_peers.sh with the stand-in for its Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls = folder, folder / "calls"
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "benchmark_peers.sh", folder / "scripts")
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def benchmark(self) -> tuple[int, str, list[str]]:
        """Exit status, error output and the commands that were called."""
        self.calls.write_text("")
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / "benchmark_peers.sh"), "out"],
            env={**os.environ, "PYTHON": str(self.python), "CALLS": str(self.calls)},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr, self.calls.read_text().splitlines()


def test_a_failed_run_is_named_with_its_reason_and_the_others_go_on(tmp_path):
    status, error, _ = Checkout(tmp_path).benchmark()
    assert status == 1
    assert error.splitlines() == [
        f"benchmark_peers.sh: failed: trl_replay-lr{lr}-seed2: RuntimeError: no luck"
        for lr in ("3e-05", "0.0001", "0.0003")
    ]
    runs = json.loads((tmp_path / "out" / "suite.json").read_text())["runs"]
    finished = [run for run in runs if (tmp_path / "out" / run["dir"] / "summary.json").exists()]
    assert (len(runs), len(finished)) == (18, 15)


def test_only_what_did_not_finish_is_made_again(tmp_path):
    checkout = Checkout(tmp_path)
    checkout.benchmark()
    _, _, calls = checkout.benchmark()
    assert not [call for call in calls if "pip install" in call]
    trained = [call for call in calls if "peers_trl.py" in call]
    assert len(trained) == 3
    assert all("--trainer replay" in call and "--seed 2 " in call for call in trained)
