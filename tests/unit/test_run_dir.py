import json
import math

from openrlhf_ext import run_dir
from openrlhf_ext.run_dir import RunDirectory, newest_metrics, read_eval_prompts, read_metrics


def test_every_line_is_json_even_with_numbers_that_are_not_finite_and_broken_text(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.log("train", 1, {"loss": math.nan, "nested": {"x": math.inf}, "ok": 0.5})
    run.log_samples([{"step": 1, "response": "half a surrogate \ud83d and \u05d0"}])
    assert read_metrics(run.path) == [{"kind": "train", "step": 1, "loss": None, "nested": {"x": None}, "ok": 0.5}]
    assert json.loads((run.path / "samples.jsonl").read_text())["response"].startswith("half")


def test_metrics_are_read_by_kind_and_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    run = RunDirectory(tmp_path)
    run.log("train", 1, {"a": 1})
    run.log("eval", 1, {"b": 2})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert [row["kind"] for row in read_metrics(run.path)] == ["train", "eval"]
    assert read_metrics(run.path, "eval") == [{"kind": "eval", "step": 1, "b": 2}]


def test_resuming_forgets_the_steps_that_will_be_done_again(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        run.log("train", step, {})
        run.log_samples([{"step": step}])
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tr')
    run.forget_after(2)
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2]
    assert len((run.path / "samples.jsonl").read_text().splitlines()) == 2


def test_an_evaluation_that_will_be_done_again_and_the_outcome_are_forgotten(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (0, 2):
        run.log("eval", step, {})
        run.log_eval_prompts(step, {"a": 0.5})
    run.log("train", 2, {})
    run.write_json("summary.json", {"steps": 2})
    run.forget_after(2, evaluated=0)
    assert [(row["kind"], row["step"]) for row in read_metrics(run.path)] == [("eval", 0), ("train", 2)]
    assert list(read_eval_prompts(run.path)) == [0]
    assert not (tmp_path / "summary.json").exists()


def test_whole_files_are_replaced_and_leave_no_temporary_file(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_json("ledger.json", {"generated": 1})
    run.write_json("ledger.json", {"generated": 2})
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"generated": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


def test_accuracies_by_prompt_come_back_by_step(tmp_path):
    run = RunDirectory(tmp_path)
    assert read_eval_prompts(run.path) == {}
    run.log_eval_prompts(0, {"a": 0.25})
    run.log_eval_prompts(50, {"a": 0.5})
    assert read_eval_prompts(run.path) == {0: {"a": 0.25}, 50: {"a": 0.5}}
    run.forget_after(10)
    assert list(read_eval_prompts(run.path)) == [0]


def test_every_replayed_group_is_traced_to_its_birth_and_a_resumed_run_forgets_later_steps(tmp_path):
    run = RunDirectory(tmp_path)
    birth = ("g7", "p1", 3, 2)
    for step, origin, births in ((4, "replay", []), (5, "replay", [birth]), (5, "rollout_replay", [birth, birth])):
        run.log_replayed(step, origin, births)
    run.log_replayed(6, "replay", [birth])
    run.forget_after(5)
    traced = {"group_id": "g7", "prompt_id": "p1", "born_step": 3, "rollouts": 2}
    lines = [json.loads(line) for line in (tmp_path / "replay.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 5, "origin": "replay", "groups": [traced]},
        {"step": 5, "origin": "rollout_replay", "groups": [traced, traced]},
    ]


def test_the_newest_line_of_a_kind_is_found_from_the_end_of_a_file_of_any_length(tmp_path, monkeypatch):
    assert newest_metrics(tmp_path, "train") is None
    run = RunDirectory(str(tmp_path))
    for step in range(50):
        run.log("train", step, {"budget/rollouts_generated": 8 * step})
    run.log("eval", 49, {"eval/accuracy": 0.5})
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 50')  # being written
    whole = (tmp_path / "metrics.jsonl").stat().st_size
    for num_bytes in (whole + 1, whole, whole - 1, 300):
        monkeypatch.setattr(run_dir, "_TAIL_BYTES", num_bytes)
        assert newest_metrics(tmp_path, "train") == read_metrics(tmp_path, "train")[-1]
        assert newest_metrics(tmp_path, "eval")["eval/accuracy"] == 0.5
