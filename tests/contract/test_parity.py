"""With every feature off, rows, advantages, loss and metrics are upstream's; where it loses rows, ours does not."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from fakes import policy_actor
from openrlhf.trainer.ppo_utils.experience import Experience, remove_padding_in_sequences, split_experience_batch
from recorded import (
    copies,
    maker,
    mixed_rewards,
    recorded_samples,
    rows_for,
    token_mean_gradient,
    train,
    train_upstream,
    upstream_args,
)

from openrlhf_ext.adapters.experience_maker import rank_windows
from openrlhf_ext.batching import PAD
from openrlhf_ext.config import GroupsConfig

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("local_ray")]

ESTIMATORS = ["group_norm", "rloo", "dr_grpo", "reinforce_baseline", "gae"]
FLAT, HALF = [0.1] * 8, [0.5] * 8


def upstream_rows(batches: list[Experience]) -> list[Experience]:
    """What upstream's replay buffer makes of micro-batches that are in order."""
    return [row for batch in batches for row in remove_padding_in_sequences(split_experience_batch(batch))]


def assert_equal(ours: object, theirs: object, where: str = "") -> None:
    """Equal field by field, tensors bit for bit and of one type."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, Experience):
        for field in fields(Experience):
            assert_equal(getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}[{key}]")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}[{i}]")
    else:
        assert ours == theirs, where


# -- rows and advantages --


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_features_micro_batches_advantages_and_returns_are_upstreams(estimator: str, num_ranks: int) -> None:
    args, rewards = upstream_args(estimator), mixed_rewards(14) + [FLAT, HALF]
    ours = maker(args, ours=True, num_ranks=num_ranks).make_experience_batch(recorded_samples(rewards))
    theirs = maker(args, ours=False, num_ranks=num_ranks).make_experience_batch(recorded_samples(rewards))
    assert len(ours) == 128 // 8
    assert_equal(ours, theirs)
    assert all(batch.advantages.abs().sum() > 0 and batch.returns.abs().sum() > 0 for batch in ours[:14])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_features_rows_are_those_of_upstreams_replay_buffer(estimator: str) -> None:
    args, rewards = upstream_args(estimator), mixed_rewards(16)
    ours = maker(args, ours=True).make_rows(recorded_samples(rewards))
    theirs = upstream_rows(maker(args, ours=False).make_experience_batch(recorded_samples(rewards)))
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "flag", [("--reward.overlong_buffer_len", "8"), ("--algo.kl.use_loss", "--algo.kl.estimator", "k2")]
)
def test_length_penalties_and_kl_settings_change_ours_as_they_change_upstreams(flag: tuple[str, ...]) -> None:
    args, rewards = upstream_args("group_norm", *flag), mixed_rewards(16)
    ours = maker(args, ours=True).make_experience_batch(recorded_samples(rewards))
    assert_equal(ours, maker(args, ours=False).make_experience_batch(recorded_samples(rewards)))
    default = maker(upstream_args(), ours=True).make_experience_batch(recorded_samples(rewards))
    assert not all(torch.equal(a.advantages, b.advantages) for a, b in zip(ours, default, strict=True))


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_with_groups_on_only_groups_of_equal_rewards_change_and_are_exactly_zero(estimator: str) -> None:
    args, rewards = upstream_args(estimator), mixed_rewards(14) + [FLAT, HALF]
    ours = maker(args, ours=True, groups=GroupsConfig()).make_experience_batch(recorded_samples(rewards))
    theirs = maker(args, ours=False).make_experience_batch(recorded_samples(rewards))
    # Micro-batches of 8 are the groups here.
    assert all(torch.count_nonzero(batch.advantages) == 0 for batch in ours[14:])
    for mine, other in zip(ours[14:], theirs[14:], strict=True):
        mine.advantages = other.advantages
    assert_equal(ours, theirs)


def test_upstream_makes_advantages_near_one_out_of_equal_rewards() -> None:
    # float32 rewards of 0.1: mean off by 7.5e-9, std 8e-9; 7.5e-9 / (8e-9 + 1e-9) = 0.83. The reason for GroupsConfig.
    args = upstream_args("group_norm", "--algo.kl.init_coef", "0")
    theirs = maker(args, ours=False).make_experience_batch(recorded_samples(mixed_rewards(15) + [FLAT]))
    assert theirs[-1].advantages.abs().max() > 0.5


def test_gae_advantages_are_left_alone_by_groups() -> None:
    args, rewards = upstream_args("gae"), mixed_rewards(15) + [FLAT]
    ours = maker(args, ours=True, groups=GroupsConfig()).make_experience_batch(recorded_samples(rewards))
    assert_equal(ours, maker(args, ours=False).make_experience_batch(recorded_samples(rewards)))


@pytest.mark.parametrize("estimator", ["group_norm", "reinforce_baseline"])
@pytest.mark.parametrize(("num_groups", "num_ranks"), [(5, 1), (5, 3), (1, 1), (1, 16)])
def test_awkward_numbers_of_groups_keep_order_and_advantages(num_groups: int, num_ranks: int, estimator: str) -> None:
    # With 16 ranks for 8 rows half of the forward passes are filled in; whitening would show if they were kept.
    args, rewards = upstream_args(estimator), mixed_rewards(num_groups)
    ours = maker(args, ours=True, num_ranks=num_ranks).make_rows(recorded_samples(rewards))
    theirs = upstream_rows(maker(args, ours=False).make_experience_batch(recorded_samples(rewards)))
    assert len(ours) == 8 * num_groups
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.sequences, other.sequences)
        torch.testing.assert_close(mine.advantages, other.advantages, atol=1e-6, rtol=0)


# -- loss and gradient --


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("rows_per_step", [128, 32])
def test_on_a_batch_that_fits_gradients_weights_and_metrics_are_upstreams(mode: str, rows_per_step: int) -> None:
    args = upstream_args("group_norm", "--actor.loss_agg_mode", mode, "--train.batch_size", str(rows_per_step))
    rows = rows_for(args)
    ours, theirs = policy_actor(args, lr=0.5), policy_actor(args, lr=0.5)
    for _ in range(2):
        status, their_status = train(ours, rows, args), train_upstream(theirs, rows)
        assert status.keys() == their_status.keys()
        for key, value in their_status.items():
            assert status[key] == pytest.approx(float(value), rel=1e-5, abs=1e-6), key
    gradients = torch.stack(ours._engine.gradients)
    assert len(gradients) == 2 * 128 // rows_per_step and gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients, torch.stack(theirs._engine.gradients), atol=1e-6, rtol=0)
    torch.testing.assert_close(ours._engine.module.logits, theirs._engine.module.logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("num_rows", [40, 8, 7, 1])
def test_any_number_of_rows_trains_as_one_mean_over_all_of_them_step_after_step(num_rows: int, mode: str) -> None:
    # The engine is configured for 16 micro-batches per optimizer step and gets 5, 1, 1 and 1.
    args = upstream_args("group_norm", "--actor.loss_agg_mode", mode)
    actor, rows = policy_actor(args, lr=0.5), rows_for(args)[:num_rows]
    for _ in range(2):
        expected = token_mean_gradient(actor, rows, args)
        train(actor, rows, args, rng=np.random.default_rng(0))
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actor._engine.gradients[-1], expected, atol=1e-6, rtol=0)
    assert len(actor._engine.gradients) == 2


def test_every_optimizer_step_is_the_mean_over_its_own_rows() -> None:
    # 40 rows at 16 per optimizer step: two steps of 20, in micro-batches of 7, 7 and 6. With a learning rate of 0 both
    # gradients are taken at the same weights.
    args = upstream_args("group_norm", "--train.batch_size", "16")
    actor, rows = policy_actor(args), rows_for(args, num_groups=5)
    train(actor, rows, args)
    expected = [token_mean_gradient(actor, part, args) for part in (rows[:20], rows[20:])]
    torch.testing.assert_close(actor._engine.gradients, expected, atol=1e-6, rtol=0)


def test_batching_by_tokens_trains_the_same_gradient() -> None:
    args = upstream_args("group_norm", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "48")
    actor, rows = policy_actor(args), rows_for(upstream_args(), num_groups=5)
    train(actor, rows, args)
    expected = token_mean_gradient(actor, rows, args)
    torch.testing.assert_close(actor._engine.gradients, [expected], atol=1e-6, rtol=0)


def test_upstream_leaks_a_short_window_into_the_next_train_step() -> None:
    # The control of the tests above: 40 rows are 5 micro-batches of the 16 that make an optimizer step.
    args = upstream_args()
    actor, rows = policy_actor(args), rows_for(args, num_groups=5)
    for _ in range(3):
        train_upstream(actor, rows)
    assert actor._engine.gradients == []
    train_upstream(actor, rows)  # the sixteenth micro-batch, in the fourth train step
    assert len(actor._engine.gradients) == 1


def test_a_padding_micro_batch_adds_nothing_to_gradient_or_metrics() -> None:
    args = upstream_args()
    actor, padded, rows = policy_actor(args), policy_actor(args), rows_for(args, num_groups=1)
    status = train(actor, rows, args)
    padded.set_windows(rank_windows([[[list(range(8)), [PAD]]]], 0, copies(rows)))
    padded_status = padded.fit(0.01)
    assert padded_status == pytest.approx(status)
    torch.testing.assert_close(padded._engine.gradients, actor._engine.gradients, atol=1e-7, rtol=0)


def test_several_epochs_train_every_row_once_in_each() -> None:
    args = upstream_args("group_norm", "--train.max_epochs", "3")
    actor, rows = policy_actor(args), rows_for(args, num_groups=2)
    train(actor, rows, args)
    expected = token_mean_gradient(actor, rows, args)
    torch.testing.assert_close(actor._engine.gradients, [expected] * 3, atol=1e-6, rtol=0)
