"""Miniatures of public bug reports that take several parts at once; ``tests/cases.md`` lists all of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engines import Engine, SeededRay
from fakes import LocalRay
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from recorded import MAX_LENGTH, maker, response, upstream_args
from replayed import SMALL, ComposedRun, group_of

from openrlhf_ext.adapters import checkpoints, generation
from openrlhf_ext.adapters.checkpoints import Checkpoints, Restored
from openrlhf_ext.adapters.engine import EngineActor
from openrlhf_ext.adapters.generation import EnginePool, GroupGenerator
from openrlhf_ext.adapters.replayed_rows import copy_sample
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.config import ExtConfig, FillConfig, GroupsConfig
from openrlhf_ext.types import FailedRequest, Prompt, RolloutGroup, RolloutRequest

pytestmark = pytest.mark.contract


def group_of_lengths(lengths: list[int], rewards: list[float], name: str, *, truncated: bool = False) -> RolloutGroup:
    """A group of responses of these lengths; with ``truncated`` the first was cut off."""
    rng, samples = random.Random(name), []
    for i, (tokens, reward) in enumerate(zip(lengths, rewards, strict=True)):
        one = response(reward=reward, prompt_tokens=4, response_tokens=tokens, rng=rng)
        one["truncated"] = truncated and i == 0
        samples.append(SamplesGenerator._process_response_into_experience(None, one, max_len=MAX_LENGTH))
    return group_of(samples, name)


# -- filtering --


def test_c07_a_length_penalty_does_not_make_an_all_wrong_group_informative(local_ray: None, tmp_path: Path) -> None:
    args = upstream_args("group_norm", *SMALL, "--reward.overlong_buffer_len", "8")
    run = ComposedRun(args, tmp_path, groups=GroupsConfig(), fill=FillConfig())
    run.step(run.groups("MMMM"))
    wrong = group_of_lengths([4, 4, 16, 16], [0.0] * 4, "wrong")
    batch = run.step([*run.groups("MMM"), wrong])
    assert [group.group_id for group in batch.fresh_groups] == ["g-1-0", "g-1-1", "g-1-2"]
    assert [group.group_id[:4] for group in batch.replayed_groups] == ["g-0-"]
    assert "g-wrong" not in [group.group_id for group in run.composer.filling.buffer.groups]
    # Where nothing can replace it, it has no gradient, though its penalized rewards 0, 0, -1, -1 differ.
    rows = run.maker.make_rows([copy_sample(rollout) for rollout in wrong.rollouts])
    assert [float(row.rewards) for row in rows] == [0.0, 0.0, -1.0, -1.0]
    assert not any(row.advantages.any() for row in rows)


def test_c09_a_harness_that_rewrites_the_prompt_leaves_every_group_whole_with_its_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "ray", SeededRay())
    engine = Engine(lambda call: ([response() | {"prompt": "rewritten", "label": "?"} for _ in range(2)], None))
    generator = GroupGenerator(EnginePool([engine], sleeps=False), upstream_args(), ExtConfig("unused"), temperature=1)
    twins = [Prompt("a", "2+2=", "4"), Prompt("b", "2+2=", "5")]
    groups = generator.generate([RolloutRequest(f"g{i}", prompt, 2) for i, prompt in enumerate(twins)])
    assert [(group.group_id, group.prompt.prompt_id, group.prompt.label) for group in groups] == [
        ("g0", "a", "4"), ("g1", "b", "5")
    ]  # fmt: skip
    assert [len(group.rollouts) for group in groups] == [2, 2]


def test_c14_a_truncated_response_stays_in_its_group_so_that_no_baseline_moves(local_ray: None) -> None:
    args = upstream_args("dr_grpo", *SMALL)
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    groups = [group_of_lengths([16, 3, 5, 4], one, str(i), truncated=True) for i, one in enumerate(rewards)]
    rows = maker(args, ours=True).make_rows([copy_sample(one) for group in groups for one in group.rollouts])
    found = [float(row.advantages[int(row.action_mask.argmax())]) for row in rows]
    assert found == [reward - sum(one) / 4 for one in rewards for reward in one]


# -- failures --


def test_c23_one_failing_rollout_refuses_its_group_and_never_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(4))

    async def execute(**call) -> dict:
        if next(calls) == 2:
            raise ValueError("the environment is gone")
        return response()

    engine = SimpleNamespace(executor=SimpleNamespace(execute=execute), _tokenizer=None, _agent_file="agent.py")
    call = {"prompt": "1+1=", "label": "2", "images": None, "sampling": {}, "max_length": 9, "num_rollouts": 4}
    responses, problem = asyncio.run(EngineActor.generate_group(engine, **call, deadline_s=9.0))
    assert len(responses) == 3 and problem.startswith("agent.py raised ValueError: the environment is gone (")

    monkeypatch.setattr(generation, "ray", SeededRay())
    pool = EnginePool([Engine(lambda call: (responses, problem))], sleeps=False)
    generator = GroupGenerator(pool, upstream_args(), ExtConfig("unused"), temperature=1)
    (result,) = generator.generate([RolloutRequest("g0", Prompt("a", "1+1=", "2"), 4)])
    assert isinstance(result, FailedRequest) and result.retryable
    assert (result.reason, result.num_generated) == ("invalid_reward", 3)


# -- checkpoints --


class SavedModel:
    """An actor group whose checkpoint is one file, of the folder layout of DeepSpeed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def async_run_method(self, name: str, tag: str) -> list[None]:
        (self._root / "_actor" / tag).mkdir(parents=True)
        (self._root / "_actor" / tag / "weights").write_text(tag)
        return [None]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setattr(checkpoints, "ray", LocalRay)
    return Checkpoints(str(tmp_path), {"_actor": SavedModel(tmp_path)}, max_num=3)


def resumed(path: Path, restored: Restored | None, **parts) -> int:
    """The step after which a trainer goes on that was asked to resume."""
    trainer = SimpleNamespace(
        _asked_to_resume=True,
        _restored=restored,
        args=SimpleNamespace(ckpt=SimpleNamespace(path=str(path))),
        init_checkpoint_states=lambda: {"global_step": 0},
        run_dir=SimpleNamespace(forget_after=lambda step: None),
        **parts,
    )
    for name in ("_restore_without_state", "_prompts_digest"):
        setattr(trainer, name, getattr(Trainer, name).__get__(trainer))
    return Trainer._restore(trainer)


@pytest.mark.parametrize("there", ["nothing", "exported weights", "state without its model"])
def test_c36_without_a_whole_checkpoint_a_resumed_run_says_that_it_starts_at_step_0(
    there: str, saved: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if there == "exported weights":
        (tmp_path / "global_step2_hf").mkdir()
    if there == "state without its model":
        saved.save(2, {"step": 2})
        (tmp_path / "_actor" / "global_step2" / "weights").unlink()
    assert saved.newest() is None and not saved.are_upstreams
    assert resumed(tmp_path, None) == 0
    assert f"no resumable checkpoint under --ckpt.path {tmp_path}: starting at step 0" in caplog.text


@pytest.mark.parametrize("prompts", [1, 8])
def test_c38_a_checkpoint_of_other_prompts_is_refused(prompts: int, tmp_path: Path) -> None:
    def digest(count: int) -> str:
        return Trainer._prompts_digest(SimpleNamespace(prompts=[Prompt(f"p{i}", f"{i}+1=", "") for i in range(count)]))

    restored = Restored("global_step2", 2, {"prompts": digest(4)})
    now = [Prompt(f"p{i}", f"{i}+1=", "") for i in range(prompts)]
    with pytest.raises(ValueError, match="global_step2 .* was made with other prompts than --data.prompt_dataset has"):
        resumed(tmp_path, restored, prompts=now)


@pytest.mark.parametrize("damage", ["empty model folder", "empty file", "half a file", "killed while saving"])
def test_c39_the_newest_whole_checkpoint_is_used(damage: str, saved: Checkpoints, tmp_path: Path) -> None:
    for step in (2, 4):
        saved.save(step, {"step": step, "rows": torch.arange(step).numpy()})
    arrays = tmp_path / "ext" / "global_step4" / "arrays.safetensors"
    if damage == "empty model folder":
        (tmp_path / "_actor" / "global_step4" / "weights").unlink()
    elif damage == "killed while saving":
        (tmp_path / "ext" / "global_step4").rename(tmp_path / "ext" / ".global_step4.tmp")
    else:
        content = arrays.read_bytes()
        arrays.write_bytes(b"" if damage == "empty file" else content[: len(content) // 2])
    found = saved.newest()
    assert found is not None and (found.step, found.state["step"]) == (2, 2)
    assert (tmp_path / "_actor" / "latest").read_text() == "global_step2"


# -- the plan of the learning rate --


@pytest.mark.parametrize(("num_prompts", "planned"), [(1, 1), (15, 1), (16, 2), (40, 5)])
def test_c58_a_data_set_smaller_than_a_batch_still_plans_a_step(num_prompts: int, planned: int) -> None:
    # Two passes in batches of 16; upstream's plan of the smallest one has no step at all.
    trainer = SimpleNamespace(args=upstream_args(), ext=ExtConfig("unused"), prompts=[None] * num_prompts)
    trainer.args.train.num_episodes = 2
    assert Trainer._planned_steps(trainer) == planned
