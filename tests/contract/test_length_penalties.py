"""Overlong and truncation penalties (``--reward.overlong_*``, ``--reward.stop_properly_penalty_coef``), by hand.

At most 16 new tokens and a buffer of 8: a response of 8 tokens or less loses nothing, one of 12 loses 4 / 8 = 0.5, one
of 16 loses 1. Then a truncated one gets -0.5 in place of whatever it has. Advantages are those of ``dr_grpo``: the
reward minus the group's mean. Every method trains a rollout with its penalties, once, however often and however late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from recorded import response, upstream_args
from replayed import SMALL, ComposedRun, group_of

from openrlhf_ext.adapters.replayed_rows import restore_sampled, store_sampled
from openrlhf_ext.checkpoint.group_codec import groups_from_state, groups_to_state
from openrlhf_ext.config import FillConfig, GroupsConfig, ReplayConfig, SuccessReplayConfig
from openrlhf_ext.types import RolloutGroup

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("local_ray")]

PENALTIES = ("--reward.overlong_buffer_len", "8", "--reward.stop_properly_penalty_coef", "-0.5")
LENGTHS, REWARDS, TRUNCATED = (4, 12, 16, 16), (1.0, 1.0, 1.0, 0.0), (False, False, False, True)
SHAPED = [1.0, 0.5, 0.0, -0.5]
ADVANTAGES = [0.75, 0.25, -0.25, -0.75]


def group(
    name: str,
    lengths: Sequence[int] = LENGTHS,
    rewards: Sequence[float] = REWARDS,
    truncated: Sequence[bool] = TRUNCATED,
    *,
    version: int = 0,
) -> RolloutGroup:
    rng = random.Random(name)
    responses = [
        response(reward=reward, response_tokens=length, truncated=cut, rng=rng)
        for length, reward, cut in zip(lengths, rewards, truncated, strict=True)
    ]
    samples = [SamplesGenerator._process_response_into_experience(None, one, max_len=100) for one in responses]
    return group_of(samples, name, version)


def flat(name: str, reward: float, lengths: Sequence[int] = LENGTHS) -> RolloutGroup:
    return group(name, lengths, [reward] * 4, [False] * 4)


def run_of(folder: Path, **parts) -> ComposedRun:
    return ComposedRun(upstream_args("dr_grpo", *SMALL, *PENALTIES), folder, **parts)


def advantages(rows: Sequence) -> list[float]:
    return [float(row.advantages[row.action_mask.bool()][0]) for row in rows]


def rewards(rows: Sequence) -> list[float]:
    assert all(row.info["reward"] == row.rewards for row in rows)
    return [float(row.rewards) for row in rows]


def test_a_fresh_group_is_trained_with_its_penalties(tmp_path: Path) -> None:
    batch = run_of(tmp_path).step([group("a")])
    assert (rewards(batch.fresh), advantages(batch.fresh)) == (SHAPED, ADVANTAGES)


def test_a_group_that_fills_a_slot_is_penalized_once_at_every_use(tmp_path: Path) -> None:
    run = run_of(tmp_path, groups=GroupsConfig(), fill=FillConfig(capacity=4, objective="on_policy"))
    run.step([group("a")])
    for name in "bcd":
        batch = run.step([flat(name, 0.0)])
        assert (rewards(batch.replayed), advantages(batch.replayed)) == (SHAPED, ADVANTAGES)


def test_a_rollout_that_is_drawn_keeps_the_penalties_of_its_birth(tmp_path: Path) -> None:
    expected = dict(zip(ADVANTAGES, SHAPED, strict=True))
    run = run_of(tmp_path, groups=GroupsConfig(), replay=ReplayConfig(warmup_steps=0, ratio=1.0))
    run.step([group("a")])
    for name in "bcd":
        batch = run.step([group(name)])
        drawn = dict(zip(advantages(batch.replayed), rewards(batch.replayed), strict=True))
        assert len(batch.replayed) == 4 and drawn.items() <= expected.items()


def test_a_success_that_is_mixed_in_is_penalized_like_the_failures_beside_it(tmp_path: Path) -> None:
    # A success of 12 tokens, 1 - 0.5 = 0.5, among failures of 4, 12 and 16 tokens: 0, -0.5 and -1, with mean -0.25.
    run = run_of(tmp_path, groups=GroupsConfig(), success_replay=SuccessReplayConfig())
    run.step([group("a", (12, 12, 12, 12), (1.0, 0.0, 0.0, 0.0), [False] * 4)])
    batch = run.step([flat("a", 0.0, (4, 4, 12, 16))])
    assert sorted(rewards(batch.fresh)) == [-1.0, -0.5, 0.0, 0.5]
    assert sorted(advantages(batch.fresh)) == [-0.75, -0.25, 0.25, 0.75]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_penalty_is_no_spread(tmp_path: Path, reward: float) -> None:
    # Shaped rewards differ, the verifier's do not: dropped, kept without gradient, stored nowhere; upstream trains it.
    dropped = run_of(tmp_path / "drop", groups=GroupsConfig(ineffective="drop"), replay=ReplayConfig(warmup_steps=0))
    assert dropped.step([flat("a", reward), group("b")]).fresh_groups[0].group_id == "g-b"
    assert dropped.composer.replay.buffer.metrics(1)["rollout_buffer/num_rollouts"] == 4
    kept = run_of(tmp_path / "keep", groups=GroupsConfig()).step([flat("a", reward)])
    assert len(set(rewards(kept.fresh))) == 3 and advantages(kept.fresh) == [0.0] * 4
    upstreams = run_of(tmp_path / "off").step([flat("a", reward)])
    assert advantages(upstreams.fresh) == [0.625, 0.125, -0.375, -0.375]


def test_pilots_that_waited_in_a_checkpoint_are_penalized_like_others(tmp_path: Path) -> None:
    waited = restore_sampled(groups_from_state(groups_to_state(store_sampled([group("a")]))), log_probs=True)
    batch = run_of(tmp_path).step(waited)
    assert (rewards(batch.fresh), advantages(batch.fresh)) == (SHAPED, ADVANTAGES)


def test_the_reward_that_decides_is_the_verifiers_also_after_training(tmp_path: Path) -> None:
    run = run_of(tmp_path, groups=GroupsConfig(), fill=FillConfig())
    fresh = group("a")
    run.step([fresh])
    assert fresh.rewards() == list(REWARDS)
    assert [float(rollout.payload.rewards) for rollout in fresh.rollouts] == list(REWARDS)
    (stored,) = run.composer.filling.buffer.groups
    assert stored.rewards() == list(REWARDS) and torch.equal(torch.tensor(stored.accuracies()), torch.tensor(REWARDS))
