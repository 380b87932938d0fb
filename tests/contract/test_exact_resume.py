"""A run that is killed and resumed is the run that was never killed: in rows, weights, buffers, counts and files.

A kill leaves the files as they are and nothing else, so most tests copy the run's folder at an instant of an unbroken
run, resume the copy, and compare every later step with the unbroken run's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import controller
import openrlhf.trainer.ppo_trainer
import openrlhf.trainer.ppo_utils.experience_maker
import openrlhf.trainer.ray.launcher
import pytest
from controller import Attempt, Cluster, Kill, Tokenizer, copy_run, outcome, write_task

from openrlhf_ext.adapters import checkpoints, generation, launch, trainer
from openrlhf_ext.checkpoint import sidecar
from openrlhf_ext.evaluation import evaluate_groups
from openrlhf_ext.run_dir import read_metrics

pytestmark = pytest.mark.contract

STEPS = 8
METHODS: dict[str, dict[str, str]] = {
    "grpo": {},
    "grpo_filter": {},
    "dapo": {"--ext.dapo.prompts_per_round": "3", "--ext.dapo.max_rounds": "3"},
    "popo": {"--algo.kl.init_coef": "0.01", "--algo.kl.target": "0.5", "--algo.kl.horizon": "100"},
    "popo_kl": {},
    "popo_stale": {"--ext.fill.min_age": "2"},
    "pilot_commit": {"--ext.pilot.max_rounds": "2"},
    "pilot_commit_unbound": {"--ext.pilot.max_rounds": "3"},
    "mopps": {"--ext.mopps.candidates": "2"},
    "mopps_popo": {"--ext.mopps.candidates": "2"},
    "aper": {"--algo.advantage.is_correction_level": "token"},
    "aper_group": {},
    "aper_uniform_pool": {"--ext.replay.capacity": "32"},
    "arpo": {},
    "combined": {},
    "combined_capped": {"--ext.throttle.max_row_frac": "0.3"},
}


def flags_of(method: str) -> dict[str, str]:
    """Sizes for a step of 4 groups of 4."""
    flags = dict(METHODS[method])
    if method.startswith(("pilot", "combined")):
        flags |= {"--ext.pilot.n_pilot": "2", "--ext.pilot.prompts_per_round": "7"}
    if method.startswith(("aper", "combined")):
        flags |= {"--ext.replay.warmup_steps": "1"}
    return flags


@pytest.fixture(autouse=True, scope="module")
def cluster(one_rank_world: None) -> Iterator[None]:
    upstream = (
        openrlhf.trainer.ppo_trainer,
        openrlhf.trainer.ppo_utils.experience_maker,
        openrlhf.trainer.ray.launcher,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (*upstream, checkpoints, generation, trainer):
            patch.setattr(module, "ray", Cluster())
        patch.setattr(trainer, "get_tokenizer", lambda *_, **__: Tokenizer())
        patch.setattr("os.fsync", lambda descriptor: None)  # no power cut here
        yield


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path, num_prompts=12)


class Snapshots:
    """Copies a run's folder at some instants: (step, name of the instant), each the first time."""

    def __init__(self, folder: Path, *wanted: tuple[int, str]) -> None:
        self._folder, self._wanted, self._step = folder, set(wanted), 0
        self.copies: dict[tuple[int, str], Path] = {}

    def __call__(self, instant: str) -> None:
        if instant.startswith("step "):
            self._step = int(instant.removeprefix("step "))
        key = (self._step, instant)
        if key in self._wanted and key not in self.copies:
            self.copies[key] = copy_run(self._folder, f"{self._folder.name}-{self._step}-{instant.replace(' ', '-')}")


def kill_at(step: int, instant: str) -> Callable[[str], None]:
    at_step = 0

    def at(name: str) -> None:
        nonlocal at_step
        at_step = int(name.removeprefix("step ")) if name.startswith("step ") else at_step
        if (at_step, name) == (step, instant):
            raise Kill

    return at


def check_same(resumed: Attempt, unbroken: Attempt, *, start: int) -> None:
    """Every step after ``start`` was made as in the unbroken run, and so are all files."""
    assert list(resumed.steps) == list(range(start + 1, STEPS + 1))
    for step, found in resumed.steps.items():
        assert found == unbroken.steps[step], f"step {step}"
    assert resumed.model.digest() == unbroken.model.digest()
    expected, found = outcome(unbroken.folder), outcome(resumed.folder)
    for name in expected:
        assert found[name] == expected[name], name


EVERY_STEP = {"--ckpt.save_steps": "1", "--ckpt.max_num": "2"}


@pytest.fixture(scope="module")
def combined(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Attempt, dict[int, Path]]:
    """An unbroken run of pilots, filling and replay that saves every step, and copies of it after each step."""
    folder = write_task(tmp_path_factory.mktemp("combined"), num_prompts=12) / "run"
    snapshots = Snapshots(folder, *((step, f"finished {step}") for step in range(1, STEPS + 1)))
    unbroken = Attempt(folder, "combined", flags_of("combined") | EVERY_STEP, at=snapshots).run()
    return unbroken, {step: copy for (step, _), copy in snapshots.copies.items()}


def resume_combined(folder: Path, **options: object) -> Attempt:
    return Attempt(folder, "combined", flags_of("combined") | EVERY_STEP, **options).run()


def saved(folder: Path) -> list[str]:
    """What a checkpoint can be resumed from: tags with a state, and with models."""
    root = folder / "checkpoints"
    tags = sidecar.tags(root / "ext")
    assert sorted(path.name for path in (root / "_actor").glob("global_step*")) == tags
    return tags


# -- every method, killed everywhere --


def has_exercised(method: str, folder: Path) -> bool:
    """Whether something was replayed, or waited between two steps, where the method can do that."""
    rows = read_metrics(folder, "train")
    replays = method.startswith(("popo", "aper", "arpo", "mopps_popo", "combined"))
    waits = method.startswith(("pilot_commit", "combined"))
    return (not replays or sum(row["step/num_replayed"] for row in rows) > 0) and (
        not waits or sum(row["budget/rollouts_waiting"] > 0 for row in rows[:-1]) > 0
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_after_any_step_and_resumed_is_the_unbroken_run(method: str, task: Path) -> None:
    flags = flags_of(method) | {"--ckpt.save_steps": "1"}
    snapshots = Snapshots(task / "run", *((step, f"finished {step}") for step in range(1, STEPS)))
    unbroken = Attempt(task / "run", method, flags, at=snapshots).run()
    assert list(unbroken.steps) == list(range(1, STEPS + 1)) and len(snapshots.copies) == STEPS - 1
    assert has_exercised(method, task / "run")
    for (step, _), folder in snapshots.copies.items():
        check_same(Attempt(folder, method, flags).run(), unbroken, start=step)


SPARSE = {
    (1, "request"): 0,
    (2, "trained"): 0,
    (3, "actor saving"): 0,
    (3, "actor saved"): 0,
    (4, "update done"): 3,
    (5, "request"): 3,
    (6, "evaluation 6"): 3,
    (6, "actor saved"): 3,
    (7, "trained"): 6,
    (8, "evaluated 8"): 6,
}
"""Instant of the kill, and the checkpoint that is there then: every third step is saved."""


@pytest.mark.parametrize("method", METHODS)
def test_steps_since_the_last_checkpoint_are_done_again_and_come_out_the_same(method: str, task: Path) -> None:
    write_task(task, num_prompts=10)  # epochs end in the midst of a step
    flags = flags_of(method) | {"--ckpt.save_steps": "3"}
    snapshots = Snapshots(task / "run", *SPARSE)
    unbroken = Attempt(task / "run", method, flags, at=snapshots).run()
    assert snapshots.copies.keys() == SPARSE.keys()
    for instant, folder in snapshots.copies.items():
        check_same(Attempt(folder, method, flags).run(), unbroken, start=SPARSE[instant])


def test_a_run_killed_again_and_again_is_the_unbroken_run(task: Path) -> None:
    flags = flags_of("combined") | {"--ckpt.save_steps": "2"}
    unbroken = Attempt(task / "run", "combined", flags).run()
    for step, instant in (
        *((2, "request"), (2, "actor saved"), (4, "actor saving"), (5, "trained"), (6, "update done")),
        *((6, "evaluation 6"), (8, "trained"), (8, "evaluated 8")),
    ):
        with pytest.raises(Kill):
            Attempt(task / "killed", "combined", flags, at=kill_at(step, instant)).run()
    check_same(Attempt(task / "killed", "combined", flags).run(), unbroken, start=6)


def test_a_kill_at_any_write_of_a_checkpoint_costs_that_checkpoint_at_most(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_of("combined") | EVERY_STEP
    copies: list[Path] = []
    saving = False

    def at(instant: str) -> None:
        nonlocal saving
        saving = len(unbroken.steps) == 5 and instant in ("update done", "actor saving", "actor saved")

    def copy_before(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            if saving:
                copies.append(copy_run(task / "run", f"copy-{len(copies)}"))
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((os, "replace"), (shutil, "rmtree"), (Path, "unlink"), (sidecar, "save_file")):
        copy_before(owner, name)
    unbroken = Attempt(task / "run", "combined", flags, at=at)
    unbroken.run()
    monkeypatch.undo()
    starts = [5 if "global_step5" in sidecar.tags(copy / "checkpoints" / "ext") else 4 for copy in copies]
    assert starts == sorted(starts) and min(starts.count(4), starts.count(5)) >= 4
    for copy, start in zip(copies, starts, strict=True):
        check_same(resume_combined(copy), unbroken, start=start)
        assert saved(copy) == ["global_step7", "global_step8"]


# -- checkpoints that cannot be used --

DAMAGES: dict[str, Callable[[Path], None]] = {
    "model.npy is missing": lambda root: (root / "_actor/global_step6/model.npy").unlink(),
    "model.npy has 10 bytes": lambda root: os.truncate(root / "_actor/global_step6/model.npy", 10),
    "manifest.json is missing": lambda root: (root / "ext/global_step6/manifest.json").unlink(),
    "manifest.json is not JSON": lambda root: os.truncate(root / "ext/global_step6/manifest.json", 30),
    "state.json is missing": lambda root: (root / "ext/global_step6/state.json").unlink(),
    "state.json has another checksum": lambda root: flip_byte(root / "ext/global_step6/state.json"),
    "arrays.safetensors has another checksum": lambda root: flip_byte(root / "ext/global_step6/arrays.safetensors"),
    "arrays.safetensors has 30 bytes": lambda root: os.truncate(root / "ext/global_step6/arrays.safetensors", 30),
    "safetensors has another checksum": lambda root: flip_byte(own_segment(root)),
    "safetensors is missing": lambda root: own_segment(root).unlink(),
}
"""Each makes the newest checkpoint of two, that of step 6, unusable; with a part of the message about it."""


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def own_segment(root: Path) -> Path:
    """The segment that only the newest checkpoint refers to."""
    new, old = (
        {digest for digest, _ in json.loads((root / f"ext/global_step{step}/manifest.json").read_text())["segments"]}
        for step in (6, 5)
    )
    (digest,) = new - old
    return root / "ext" / "segments" / f"{digest}.safetensors"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_out_with_a_message_for_the_one_before(
    combined: tuple[Attempt, dict[int, Path]], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken, copies = combined
    folder = copy_run(copies[6], f"damaged-{len(list(unbroken.folder.parent.iterdir()))}")
    DAMAGES[damage](folder / "checkpoints")
    check_same(resume_combined(folder), unbroken, start=5)
    assert "checkpoint global_step6 is left out: " in caplog.text and damage in caplog.text
    assert saved(folder) == ["global_step7", "global_step8"]


def test_without_a_usable_checkpoint_the_run_starts_anew_and_says_so(
    combined: tuple[Attempt, dict[int, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    unbroken, copies = combined
    folder = copy_run(copies[6], "none-usable")
    for state in (folder / "checkpoints" / "ext").glob("global_step*/state.json"):
        flip_byte(state)
    check_same(resume_combined(folder), unbroken, start=0)
    assert "no resumable checkpoint" in caplog.text and "starting at step 0" in caplog.text


def test_another_data_set_is_refused(combined: tuple[Attempt, dict[int, Path]], tmp_path: Path) -> None:
    folder = copy_run(combined[1][6], "other-data")
    write_task(tmp_path, num_prompts=12)
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace('"label": "7"', '"label": "8"'))
    flags = flags_of("combined") | EVERY_STEP | {"--data.prompt_dataset": str(tmp_path / "train.jsonl")}
    with pytest.raises(ValueError, match="other prompts than --data.prompt_dataset"):
        Attempt(folder, "combined", flags).run()


def test_a_checkpoint_of_stock_openrlhf_gives_its_models_only(
    combined: tuple[Attempt, dict[int, Path]], task: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unbroken, copies = combined
    shutil.copytree(copies[6] / "checkpoints" / "_actor", task / "stock" / "_actor")
    (task / "stock/_actor/global_step6/states.json").write_text('{"global_step": 6}')
    flags = flags_of("combined") | EVERY_STEP | {"--ckpt.path": str(task / "stock")}
    resumed = Attempt(task / "run", "combined", flags)
    assert resumed.model.digest() == unbroken.steps[6]["model"]
    resumed.run()
    assert "has models only, of step 6" in caplog.text
    assert list(resumed.steps) == [7, 8]
    rows = read_metrics(task / "run")
    assert [row["step"] for row in rows] == [7, 8, 8]
    assert rows[0]["budget/rollouts_generated"] == rows[0]["step/rollouts_generated"]


def test_the_state_goes_on_with_another_number_of_ranks(combined: tuple[Attempt, dict[int, Path]]) -> None:
    unbroken, copies = combined
    folder = copy_run(copies[6], "two-ranks")
    resumed = resume_combined(folder, num_ranks=2)
    assert list(resumed.steps) == [7, 8]
    # The step's micro-batches are others, so the weights after it are; what it samples and replays is not.
    for name in ("pool", "sampler", "ledger"):
        assert resumed.steps[7][name] == unbroken.steps[7][name]
    seventh = [[line for line in lines(run.folder) if line["step"] == 7] for run in (resumed, unbroken)]
    assert seventh[0] == seventh[1] != []


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


# -- which checkpoints are kept --

SCORES = (0.9, 0.1, 0.5, 0.3, 0.2, 0.7, 0.4, 0.6, 0.65)
"""Of the evaluations after each step. Those after steps 1, 2 and 5 are better than all before them; the one at the
start, of a policy that is not trained, does not count."""
BEST = {
    **{"--eval.steps": "1", "--ckpt.save_steps": "3", "--ckpt.max_num": "1"},
    "--ckpt.best_metric_key": "eval/accuracy",
}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(groups: list, **options: object) -> dict[str, float]:
        return evaluate_groups(groups, **options) | {"eval/accuracy": SCORES[groups[0].policy_version]}

    monkeypatch.setattr(trainer, "evaluate_groups", evaluate)


def best(folder: Path) -> tuple[str, float]:
    content = json.loads((folder / "checkpoints/ext/best.json").read_text())
    return content["tag"], content["value"]


@pytest.mark.usefixtures("scored")
def test_the_best_checkpoint_is_kept_beside_the_newest_ones_and_does_not_become_the_latest(task: Path) -> None:
    kept = {1: [1], 2: [2], 3: [2, 3], 4: [2, 3], 5: [5], 6: [5, 6], 7: [5, 6], 8: [5, 8]}
    snapshots = Snapshots(task / "run", *((step, f"finished {step}") for step in kept))
    Attempt(task / "run", "grpo", BEST, at=snapshots).run()
    for (step, _), copy in snapshots.copies.items():
        assert saved(copy) == [f"global_step{tag}" for tag in kept[step]]
        assert (copy / "checkpoints/_actor/latest").read_text() == f"global_step{kept[step][-1]}"
    assert best(task / "run") == ("global_step5", 0.7)


@pytest.mark.parametrize("max_num", [1, 2, 3, 5])
def test_as_many_checkpoints_are_kept_as_was_asked_for(task: Path, max_num: int) -> None:
    Attempt(task / "run", "grpo", {"--ckpt.save_steps": "1", "--ckpt.max_num": str(max_num)}).run()
    assert saved(task / "run") == [f"global_step{step}" for step in range(STEPS - max_num + 1, STEPS + 1)]


@pytest.mark.usefixtures("scored")
def test_a_best_step_that_is_done_again_is_the_best_again(task: Path) -> None:
    snapshots = Snapshots(task / "run", (5, "finished 5"), (7, "trained"))
    unbroken = Attempt(task / "run", "grpo", BEST | {"--ckpt.max_num": "2"}, at=snapshots).run()
    damaged, later = snapshots.copies.values()
    (damaged / "checkpoints/ext/global_step5/state.json").unlink()
    for folder, start in ((damaged, 3), (later, 6)):
        check_same(Attempt(folder, "grpo", BEST | {"--ckpt.max_num": "2"}).run(), unbroken, start=start)
        assert best(folder) == ("global_step5", 0.7)
        assert saved(folder) == saved(task / "run")


@pytest.mark.usefixtures("scored")
def test_a_kill_before_the_best_checkpoint_is_noted_does_not_lose_it(
    task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = Attempt(task / "run", "grpo", BEST).run()
    with monkeypatch.context() as patch:
        write_best = checkpoints.Checkpoints._write_best

        def killed(self: checkpoints.Checkpoints) -> None:
            if self.best["tag"] == "global_step5":
                raise Kill
            write_best(self)

        patch.setattr(checkpoints.Checkpoints, "_write_best", killed)
        with pytest.raises(Kill):
            Attempt(task / "killed", "grpo", BEST).run()
    assert best(task / "killed") == ("global_step2", 0.5)
    check_same(Attempt(task / "killed", "grpo", BEST).run(), unbroken, start=5)
    assert best(task / "killed") == ("global_step5", 0.7)
    assert saved(task / "killed") == ["global_step5", "global_step8"]


# -- asked to stop --

RARELY = {"--ckpt.save_steps": "100"}
NO_CHECKPOINTS = {"--ckpt.save_steps": "-1", "--ext.resume": "never"}


@pytest.fixture
def supervised() -> Iterator[None]:
    """The handlers of the command's driver (supervisor.py)."""
    codes = {signal.SIGTERM: 143, signal.SIGUSR1: 85}
    previous = {number: signal.signal(number, lambda number, _frame: sys.exit(codes[number])) for number in codes}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def send_at(step: int, instant: str, *numbers: int) -> Callable[[str], None]:
    """Signals at an instant, once."""
    at = kill_at(step, instant)
    left = list(numbers)

    def send(name: str) -> None:
        try:
            at(name)
        except Kill:
            while left:
                signal.raise_signal(left.pop(0))

    return send


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)])
@pytest.mark.parametrize(
    ("step", "instant", "stopped_after"),
    [(3, "request", 3), (3, "evaluation 3", 3), (4, "finished 4", 5), (6, "trained", 6), (8, "trained", 8)],
)
def test_a_run_that_is_asked_to_stop_ends_its_step_saves_it_and_goes_on_exactly_there(
    task: Path, number: int, code: int, step: int, instant: str, stopped_after: int
) -> None:
    unbroken = Attempt(task / "run", "popo", RARELY).run()
    with pytest.raises(SystemExit) as stopped:
        Attempt(task / "stopped", "popo", RARELY, at=send_at(step, instant, number)).run()
    assert stopped.value.code == code
    assert saved(task / "stopped") == [f"global_step{stopped_after}"]
    assert not (task / "stopped" / "summary.json").exists()
    # What was due after steps 3, 6 and 8 is evaluated by the next attempt.
    check_same(Attempt(task / "stopped", "popo", RARELY).run(), unbroken, start=stopped_after)


@pytest.mark.usefixtures("supervised", "scored")
def test_an_evaluation_that_a_stop_has_put_off_may_still_name_the_best_checkpoint(task: Path) -> None:
    flags = BEST | {"--ckpt.save_steps": "100"}
    with pytest.raises(SystemExit):
        Attempt(task / "run", "grpo", flags, at=send_at(5, "trained", signal.SIGTERM)).run()
    assert best(task / "run") == ("global_step2", 0.5)
    Attempt(task / "run", "grpo", flags).run()
    assert best(task / "run") == ("global_step5", 0.7)
    assert saved(task / "run") == ["global_step5", "global_step8"]


@pytest.mark.usefixtures("supervised")
def test_an_evaluation_that_was_put_off_is_done_once_however_often_it_is_killed(task: Path) -> None:
    unbroken = Attempt(task / "run", "grpo", RARELY).run()
    with pytest.raises(SystemExit):
        Attempt(task / "stopped", "grpo", RARELY, at=send_at(3, "trained", signal.SIGUSR1)).run()
    for instant in ("evaluation 3", "evaluated 3"):
        with pytest.raises(Kill):
            Attempt(task / "stopped", "grpo", RARELY, at=kill_at(0, instant)).run()
    check_same(Attempt(task / "stopped", "grpo", RARELY).run(), unbroken, start=3)


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_beyond_the_deadline_is_abandoned_and_the_last_checkpoint_stays(task: Path, number: int) -> None:
    flags = {"--ckpt.save_steps": "2"}
    unbroken = Attempt(task / "run", "popo", flags).run()
    with pytest.raises(SystemExit) as stopped:
        Attempt(task / "stopped", "popo", flags, at=send_at(5, "trained", number, signal.SIGALRM)).run()
    assert stopped.value.code == 143
    assert saved(task / "stopped") == ["global_step2", "global_step4"]
    check_same(Attempt(task / "stopped", "popo", flags).run(), unbroken, start=4)


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)])
def test_before_the_first_step_a_run_ends_at_once_and_is_started_again(task: Path, number: int, code: int) -> None:
    unbroken = Attempt(task / "run", "popo", RARELY).run()
    stopped = Attempt(task / "stopped", "popo", RARELY, at=send_at(0, "evaluation 0", number))
    with pytest.raises(SystemExit) as ended:
        stopped.run()
    assert (ended.value.code, stopped.steps, stopped.written, saved(task / "stopped")) == (code, {}, [], [])
    check_same(Attempt(task / "stopped", "popo", RARELY).run(), unbroken, start=0)


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("instant", "flags"),
    [("evaluation 8", RARELY), ("writing the model", RARELY), ("evaluation 8", NO_CHECKPOINTS)],
)
def test_a_run_whose_last_step_is_trained_and_evaluated_writes_its_model_and_ends(
    task: Path, number: int, instant: str, flags: dict[str, str]
) -> None:
    unbroken = Attempt(task / "run", "popo", flags).run()
    stopped = Attempt(task / "stopped", "popo", flags, at=send_at(8, instant, number)).run()
    check_same(stopped, unbroken, start=0)
    assert stopped.written == unbroken.written == [unbroken.model.digest()]


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("instant", "more"), [("trained", ()), ("writing the model", ()), ("evaluation 8", (signal.SIGALRM,))]
)
def test_without_checkpoints_the_final_model_is_written_before_a_stop_can_lose_it(
    task: Path, number: int, instant: str, more: tuple[int, ...]
) -> None:
    stopped = Attempt(task / "run", "grpo", NO_CHECKPOINTS, at=send_at(8, instant, number, *more))
    with pytest.raises(SystemExit) as ended:
        stopped.run()
    assert ended.value.code == 143
    assert stopped.written == [stopped.model.digest()] and list(stopped.steps) == list(range(1, STEPS + 1))
    # It was not evaluated, so it has no outcome.
    assert not (task / "run" / "summary.json").exists()


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 85)])
@pytest.mark.parametrize("step", [3, 8])
def test_a_step_is_saved_when_the_evaluation_after_it_takes_longer_than_the_deadline(
    task: Path, step: int, number: int, code: int
) -> None:
    unbroken = Attempt(task / "run", "popo", RARELY).run()
    stopped = Attempt(task / "stopped", "popo", RARELY, at=send_at(step, f"evaluation {step}", number, signal.SIGALRM))
    with pytest.raises(SystemExit) as ended:
        stopped.run()
    assert (ended.value.code, saved(task / "stopped")) == (code, [f"global_step{step}"])
    resumed = Attempt(task / "stopped", "popo", RARELY).run()
    check_same(resumed, unbroken, start=step)
    assert resumed.written == unbroken.written


def test_the_supervisor_gives_the_step_longer_than_its_deadline(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(launch, "supervise", lambda target, *, stop_grace_s: given.append(stop_grace_s))
    for deadline in ("20", "600"):
        flags = {"--ext.run_dir": str(task / "run"), "--ext.stop_deadline_s": deadline}
        launch.run(controller.settings("grpo", flags, task), {})
    assert given == [30, 610]


# -- failures and ends --


@pytest.mark.parametrize("instant", ["evaluation 6", "evaluated 6"])
def test_a_step_is_saved_when_what_comes_after_it_fails(task: Path, instant: str) -> None:
    def fail(name: str) -> None:
        if name == instant:
            raise RuntimeError("no engine is left")

    unbroken = Attempt(task / "run", "popo", RARELY).run()
    with pytest.raises(RuntimeError, match="no engine is left"):
        Attempt(task / "failed", "popo", RARELY, at=fail).run()
    assert saved(task / "failed") == ["global_step6"]
    check_same(Attempt(task / "failed", "popo", RARELY).run(), unbroken, start=6)


def test_a_step_that_fails_itself_is_not_saved(task: Path) -> None:
    def fail(name: str) -> None:
        if name == "trained" and len(attempt.steps) == 4:
            raise RuntimeError("CUDA error")

    attempt = Attempt(task / "run", "grpo", {"--ckpt.save_steps": "3"}, at=fail)
    with pytest.raises(RuntimeError, match="CUDA error"):
        attempt.run()
    assert saved(task / "run") == ["global_step3"]


def test_a_finished_run_trains_nothing_again_and_keeps_its_outcome(task: Path) -> None:
    unbroken = Attempt(task / "run", "popo", RARELY).run()
    before = outcome(task / "run")
    resumed = Attempt(task / "run", "popo", RARELY).run()
    assert resumed.steps == {} and outcome(task / "run") == before
    assert resumed.model.digest() == unbroken.model.digest()
    # With more steps to make it goes on.
    longer = Attempt(task / "run", "popo", RARELY | {"--ext.max_steps": "10"}).run()
    assert list(longer.steps) == [9, 10]


@pytest.mark.parametrize(("eval_steps", "killed_at"), [("100", "evaluation 1"), ("100", None), ("1", None)])
def test_a_run_that_has_used_up_its_prompts_is_finished(
    task: Path, monkeypatch: pytest.MonkeyPatch, eval_steps: str, killed_at: str | None
) -> None:
    monkeypatch.setattr(controller, "ACCURACIES", (1.0,))
    solved = {"--ext.pool.exclude_min_visits": "1", "--ext.pool.exclude_min_rollouts": "2", "--ext.pool.floor": "0"}
    flags = flags_of("pilot_commit") | solved | {"--eval.steps": eval_steps}
    flags |= {"--ckpt.save_steps": "1"} if killed_at else RARELY
    snapshots = Snapshots(task / "run", (2, str(killed_at)))
    unbroken = Attempt(task / "run", "pilot_commit", flags, at=snapshots).run()
    assert list(unbroken.steps) == [1]
    before = outcome(task / "run")
    for folder in (task / "run", *snapshots.copies.values()):
        assert Attempt(folder, "pilot_commit", flags).run().steps == {}
        assert outcome(folder) == before
    assert len(snapshots.copies) == bool(killed_at)
