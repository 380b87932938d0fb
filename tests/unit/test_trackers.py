"""TensorBoard and an offline Weights & Biases run, for real."""

import pytest

from openrlhf_ext.trackers import open_trackers

NAMES = {"project": "openrlhf_ext_test", "entity": None, "group": None, "name": "run"}
KEY = "0123456789abcdef0123456789abcdef01234567"


def test_nothing_is_opened_when_everything_is_off(tmp_path):
    assert (
        open_trackers(
            run_dir=tmp_path, tensorboard_dir=None, wandb_mode="off", wandb_key=None, wandb_names=NAMES, config={}
        )
        == []
    )
    assert list(tmp_path.iterdir()) == []


def test_c60_tensorboard_and_offline_wandb_hold_the_figures_and_no_file_holds_the_key(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("sys.argv", ["train_ppo_ray", "--logger.wandb.key", KEY])  # wandb records it by default
    trackers = open_trackers(
        run_dir=tmp_path,
        tensorboard_dir=str(tmp_path / "tb"),
        wandb_mode="offline",
        wandb_key=KEY,
        wandb_names=NAMES,
        config={"config": "a: 1"},
    )
    assert len(trackers) == 2
    for tracker in trackers:
        tracker.log(3, {"eval/accuracy": 0.25, "budget/rollouts_generated": 384})
        tracker.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [(3, 0.25)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not any(KEY.encode() in path.read_bytes() for path in files)
    # A second run in the same directory continues the same wandb run.
    assert len((tmp_path / "wandb_run_id").read_text().strip()) == 8


def test_c60_a_resumed_run_is_the_same_run_of_wandb(tmp_path, monkeypatch):
    wandb, starts = pytest.importorskip("wandb"), []

    def init(**settings):
        starts.append(settings)
        raise OSError("no network")

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        trackers = open_trackers(
            run_dir=tmp_path, tensorboard_dir=None, wandb_mode="online", wandb_key=None, wandb_names=NAMES, config={}
        )
        assert trackers == []  # the run goes on without it
    assert starts[0]["id"] == starts[1]["id"] and starts[0]["resume"] == "allow"
