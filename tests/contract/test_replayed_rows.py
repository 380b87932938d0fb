"""A stored group is trained as if it had come fresh, with the weights of its birth; fresh rows do not notice."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from fakes import TinyPolicy, policy_actor
from openrlhf.models import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from recorded import (
    OFF_POLICY,
    copies,
    mixed_rewards,
    recorded_samples,
    rows_for,
    token_mean_gradient,
    train,
    upstream_args,
)
from replayed import BEHAVIOR, birth, group_of, groups_of, maker_of, mixed_rows, samples_of, step_rows, weigh
from test_parity import assert_equal

from openrlhf_ext.adapters.actors import _add_metrics, _reduce
from openrlhf_ext.adapters.batch_composer import Batch, BatchComposer
from openrlhf_ext.adapters.generation import unify_info
from openrlhf_ext.adapters.measured_loss import MeasuredLoss, ratios
from openrlhf_ext.adapters.replayed_rows import ORIGIN, ORIGINS, copy_sample, restore_samples, store_group
from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.config import FillConfig
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.sampling import SampledStep

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("local_ray")]

GROUP_ESTIMATORS = ["group_norm", "rloo", "dr_grpo"]


def one_group(seed: int = 0):
    rewards = [[float(reward) for reward in group] for group in mixed_rewards(1, seed=seed + 1)]
    return group_of(recorded_samples(rewards, seed))


# -- there and back --


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, "gae"])
@pytest.mark.parametrize("flags", [(), ("--reward.overlong_buffer_len", "10"), ("--rollout.micro_batch_size", "1")])
def test_under_unchanged_weights_a_restored_group_is_what_it_was_at_birth_at_every_use(estimator, flags) -> None:
    # The length penalty (over 16 - 10 = 6 tokens) is part of the law: added at birth and at both uses, never twice.
    args, group = upstream_args(estimator, *flags), one_group()
    unify_info([rollout.payload for rollout in group.rollouts])
    stored, born = birth(args, group)
    for _ in range(2):
        rows = step_rows(args, [], [stored], policy=BEHAVIOR)
        for row, old in zip(rows, born, strict=True):
            assert_equal(replace(row, rollout_log_probs=old.rollout_log_probs), old)
        metrics = weigh(rows, [stored], FillConfig())
        assert all(torch.equal(row.advantages, old.advantages) for row, old in zip(rows, born, strict=True))
        assert metrics["weight_mean"] == metrics["effective_sample_frac"] == 1.0
        assert metrics["behavior_kl"] == 0.0
    shaped = [float(old.rewards) != rollout.reward for old, rollout in zip(born, group.rollouts, strict=True)]
    assert any(shaped) == ("--reward.overlong_buffer_len" in flags)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_other_weights_change_nothing_but_the_log_probabilities(estimator: str) -> None:
    # Rewards are verified and belong to one policy, so are the advantages; fresh groups beside it do not matter.
    args = upstream_args(estimator, "--algo.kl.init_coef", "0")
    stored, born = birth(args, one_group())
    rows = step_rows(args, groups_of(recorded_samples(mixed_rewards(2, seed=9), seed=9)), [stored])[16:]
    policy = TinyPolicy(OFF_POLICY)
    for row, old in zip(rows, born, strict=True):
        assert torch.equal(row.sequences, old.sequences) and torch.equal(row.action_mask, old.action_mask)
        assert torch.equal(row.rewards, old.rewards)
        torch.testing.assert_close(row.advantages, old.advantages, atol=1e-6, rtol=0)
        expected = policy(row.sequences[None], row.action_mask[None], None)[0]
        torch.testing.assert_close(row.action_log_probs, expected)
        assert (row.action_log_probs - old.action_log_probs).abs().max() > 0.1


def test_nothing_that_happens_to_rows_later_reaches_a_stored_group() -> None:
    args, group = upstream_args(), one_group()
    stored, rows = birth(args, group, engine_gap=True)
    before = [[a.copy() for a in arrays(rollout.payload)] for rollout in stored.rollouts]
    sources = rows + [rollout.payload for rollout in group.rollouts]
    restored = step_rows(args, [], [stored])  # what is restored is a copy, too
    weigh(restored, [stored], FillConfig(objective="behavior_clip"), correct_engine=True)
    sources += restored
    for row in sources:
        for field in fields(Experience):
            if isinstance(value := getattr(row, field.name), torch.Tensor):
                value.zero_()
        row.info.clear()
    for rollout, old in zip(stored.rollouts, before, strict=True):
        assert all((new == kept).all() for new, kept in zip(arrays(rollout.payload), old, strict=True))
        assert "reward" in rollout.payload.info
    assert [rollout.reward for rollout in stored.rollouts] == group.rewards()


def arrays(row) -> tuple:
    return row.tokens, row.action_mask, row.behavior_log_probs, row.engine_gap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_come_back_unharmed_and_stay_with_their_rows(dtype: torch.dtype) -> None:
    args, samples = upstream_args(), recorded_samples(mixed_rewards(1))
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.randn(4 * n, 1176, generator=generator).to(dtype) for n in (2, 3)]
    images = [{"pixel_values": one, "image_grid_thw": torch.tensor([[1, 4, len(one) // 4]])} for one in pixels]
    for i, sample in enumerate(samples):  # a tool's second image in two of the rollouts; one text-only row
        sample.mm_train_inputs = [None if i == 7 else {k: v.clone() for k, v in images[i in (2, 5)].items()}]
    stored, _ = birth(args, group_of(samples))
    assert len({id(rollout.payload.multimodal) for rollout in stored.rollouts}) == 3
    for i, row in enumerate(step_rows(args, [], [stored])):
        (found,) = row.mm_train_inputs
        expected = None if i == 7 else images[i in (2, 5)]
        assert (found is None) == (expected is None)
        assert_equal(found, expected)


@pytest.mark.parametrize("log_probs", [True, False])
def test_all_rows_have_engine_log_probabilities_or_none_has(log_probs: bool) -> None:
    args = upstream_args()
    stored, _ = birth(args, one_group())
    fresh = groups_of(samples_of(3, 2, log_probs=log_probs))
    rows = step_rows(args, fresh, [stored], log_probs=log_probs)
    assert [row.rollout_log_probs is not None for row in rows] == [log_probs] * 16


def test_c18_all_rows_have_the_same_info_whatever_the_verifier_said_of_each() -> None:
    args = upstream_args()
    rows = mixed_rows(args)
    assert len({tuple(row.info) for row in rows}) == 1 and ORIGIN in rows[0].info
    status = train(policy_actor(args), rows, args)
    # 7 fresh rows without "format", 8 replayed with their reward as it.
    expected = sum(float(row.rewards) for row in rows[7:]) / 15
    assert status["format"] == pytest.approx(expected)


# -- the weights --


@pytest.mark.parametrize("objective", ["decoupled", "on_policy", "behavior_clip"])
def test_replayed_rows_get_their_weight_and_center_and_fresh_rows_stay_bit_for_bit(objective: str) -> None:
    args = upstream_args()
    stored, born = birth(args, one_group())
    rows = step_rows(args, groups_of(recorded_samples(mixed_rewards(1, seed=9), seed=9)), [stored])
    plain = copies(rows)
    metrics = weigh(rows, [stored], FillConfig(objective=objective, weight_cap=2.0))
    for row, old in zip(rows[:8], plain[:8], strict=True):
        assert row.info.pop(ORIGIN) == ORIGINS.index("fresh")
        assert_equal(row, old)
    weights, kls = [], []
    for row, old, behavior in zip(rows[8:], plain[8:], (row.action_log_probs for row in born), strict=True):
        on = row.action_mask.bool()
        gap = old.action_log_probs[on] - behavior[on]
        weight = gap.exp().clamp(max=2.0) if objective == "decoupled" else torch.ones_like(gap)
        center = behavior if objective == "behavior_clip" else old.action_log_probs
        torch.testing.assert_close(row.advantages[on], old.advantages[on] * weight)
        assert torch.equal(row.action_log_probs[on], center[on]) and row.info[ORIGIN] == ORIGINS.index("replay")
        weights.append(weight)
        kls.append(torch.expm1(gap) - gap)
    assert metrics["weight_mean"] == pytest.approx(torch.cat(weights).mean().item(), rel=1e-5)
    assert metrics["behavior_kl_age_01"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-4)
    assert (metrics["weight_max"] == pytest.approx(2.0)) == (objective == "decoupled")


@pytest.mark.parametrize("objective", ["decoupled", "on_policy", "behavior_clip"])
def test_the_engine_correction_of_a_replayed_row_is_that_of_its_birth(objective: str) -> None:
    # OpenRLHF's coefficient is exp(old - rollout): that of fresh rows is left alone.
    args = upstream_args("group_norm", "--algo.advantage.is_correction_level", "token")
    stored, born = birth(args, one_group(), engine_gap=True)
    rows = step_rows(args, groups_of(recorded_samples(mixed_rewards(1, seed=9), seed=9)), [stored])
    engine = [row.rollout_log_probs for row in rows]
    weigh(rows, [stored], FillConfig(objective=objective), correct_engine=True)
    assert all(row.rollout_log_probs is old for row, old in zip(rows[:8], engine[:8], strict=True))
    for row, old in zip(rows[8:], born, strict=True):
        on = row.action_mask.bool()
        found, expected = ((r.action_log_probs - r.rollout_log_probs)[on] for r in (row, old))
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)  # kept in float16
        assert expected.abs().max() > 0.1


def test_the_divergence_of_stored_groups_is_zero_under_their_own_policy_and_grows_away_from_it() -> None:
    args = upstream_args()
    near, near_rows = birth(args, one_group(), policy=OFF_POLICY)
    far, far_rows = birth(args, one_group(seed=2), policy=BEHAVIOR)
    current = maker_of(args, OFF_POLICY)
    found = BatchComposer._divergence(SimpleNamespace(_maker=current), [far, near])
    gaps = []
    for row, old in zip(step_rows(args, [], [far]), far_rows, strict=True):
        gaps.append((row.action_log_probs - old.action_log_probs)[row.action_mask.bool()].double())
    gap = torch.cat(gaps)
    assert found == pytest.approx([(torch.expm1(gap) - gap).mean().item(), 0.0], rel=1e-5)
    assert found[0] > 0.1


@pytest.mark.parametrize("num_ranks", [1, 3, 16])
@pytest.mark.parametrize("flags", [(), ("--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "48")])
def test_log_probs_are_those_of_make_rows_however_the_rows_are_spread(num_ranks: int, flags) -> None:
    # 8 rows on 16 ranks: half of the micro-batches are padding.
    args = upstream_args("group_norm", *flags)
    made, samples = maker_of(args, OFF_POLICY, num_ranks), recorded_samples(mixed_rewards(1))
    found = made.log_probs([replace(sample) for sample in samples])
    expected = [row.action_log_probs for row in made.make_rows(samples)]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)


# -- the loss --


@pytest.mark.parametrize(
    ("fresh_lengths", "stored_lengths"), [((3, 3), (20, 20)), ((20, 20), (3, 3)), ((3, 3), (2, 1)), ((2, 1), (20, 20))]
)
def test_c21_a_group_of_another_length_adds_the_gradient_that_it_has_alone(fresh_lengths, stored_lengths) -> None:
    args = upstream_args()
    stored, _ = birth(args, group_of(samples_of(*stored_lengths, seed=1)))
    rows = step_rows(args, [group_of(samples_of(*fresh_lengths))], [stored])
    weigh(rows, [stored], FillConfig())
    actor = policy_actor(args)
    train(actor, rows, args)
    # A mean over tokens: each group's own mean gradient, times its share of the tokens.
    alone = [token_mean_gradient(actor, part, args) for part in (rows[:8], rows[8:])]
    counts = [sum(int(row.action_mask.sum()) for row in part) for part in (rows[:8], rows[8:])]
    expected = sum(count * gradient for count, gradient in zip(counts, alone, strict=True)) / sum(counts)
    assert alone[1].abs().max() > 1e-3
    torch.testing.assert_close(actor._engine.gradients[-1], expected, atol=1e-6, rtol=0)


def test_off_or_on_fresh_rows_alone_train_the_same_bits_and_only_on_is_measured() -> None:
    args, rows = upstream_args(), rows_for(upstream_args(), num_groups=2)
    off, on = policy_actor(args), policy_actor(args)
    status = train(off, rows, args)
    weigh(weighed := copies(rows), [], FillConfig())
    measured = train(on, weighed, args)
    assert torch.equal(off._engine.gradients[0], on._engine.gradients[0])
    assert type(off.trainer.actor_loss_fn) is PolicyLoss and type(on.trainer.actor_loss_fn) is MeasuredLoss
    assert {key: measured[key] for key in status} == status
    # The policy is far from where the old log-probabilities come from, so the clip is at work.
    assert ratios(measured) == {
        "fresh/token_frac": 1.0,
        "fresh/ratio_clipped_frac": pytest.approx(clip_frac(on, rows)),
    }
    assert set(measured) == set(status)


def clip_frac(actor, rows: list[Experience]) -> float:
    """Share of tokens that OpenRLHF's clip cuts off, over all rows."""
    clipped, tokens = 0, 0
    for row in rows:
        on = row.action_mask.bool()
        current = actor._engine.module(row.sequences[None], row.action_mask[None], None)[0]
        ratio = (current - row.action_log_probs).exp()[on]
        clipped += int((torch.where(row.advantages[on] > 0, ratio > 1.2, ratio < 0.8)).sum())
        tokens += int(on.sum())
    assert clipped > 0
    return clipped / tokens


def test_clipped_tokens_are_counted_by_origin_and_add_up_over_uneven_micro_batches() -> None:
    loss, totals = MeasuredLoss(PolicyLoss(0.2, 0.2)), {}
    ratio = torch.tensor([[1.5, 1.5, 0.5], [1.0, 0.5, 1.5], [1.5, 0.5, 0.5], [1.5, 1.5, 1.5]])
    advantages = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    origins = torch.tensor([ORIGINS.index(name) for name in ("fresh", "replay", "rollout_replay", "replay")])
    # Fresh: row 0 has 2 of 3 clipped. Filled in: row 1 has 1 of 2; row 3 is padding. Drawn: row 2 has 1 of 1.
    for rows in (slice(0, 2), slice(2, 3), slice(3, 4)):
        loss.watch(origins[rows])
        value, *_ = loss(ratio[rows].log(), torch.zeros(1, 3), advantages[rows], mask[rows], batch_num_tokens=6.0)
        plain = PolicyLoss(0.2, 0.2)(
            ratio[rows].log(), torch.zeros(1, 3), advantages[rows], action_mask=mask[rows], batch_num_tokens=6.0
        )
        assert torch.equal(value, plain[0])
        shares = loss.take()
        tokens = float(mask[rows].sum())
        status = {"metrics": shares, "weights": dict.fromkeys(shares, "token")}
        _add_metrics(totals, {}, {**status, "num_samples": 1.0, "num_action_tokens": tokens})
    assert ratios(_reduce(totals)) == {
        "fresh/token_frac": pytest.approx(3 / 6),
        "fresh/ratio_clipped_frac": pytest.approx(2 / 3),
        "replay/token_frac": pytest.approx(2 / 6),
        "replay/ratio_clipped_frac": pytest.approx(1 / 2),
        "rollout_replay/token_frac": pytest.approx(1 / 6),
        "rollout_replay/ratio_clipped_frac": pytest.approx(1.0),
    }
    loss(ratio.log(), torch.zeros(4, 3), advantages, mask)
    assert loss.take() == {}  # not watched


# -- the step --


def test_a_step_without_training_counts_in_ages_and_steps_of_birth() -> None:
    class Nothing:
        def __getattr__(self, name):
            return lambda *args, **options: 0

    controller = SimpleNamespace(
        sampler=SimpleNamespace(sample_step=SampledStep),
        composer=SimpleNamespace(compose=lambda groups, **options: Batch(), store=lambda batch, **options: {}),
        generator=SimpleNamespace(policy_version=6, take_metrics=dict),
        ext=SimpleNamespace(groups=None),
        source=Nothing(),
        prompt_pool=SimpleNamespace(epoch=0, metrics=dict),
        ledger=RolloutLedger(),
        reporter=Nothing(),
        _skip=lambda sampled: {},
    )
    Trainer._step(controller, 7)
    assert controller.generator.policy_version == 7


def test_restored_samples_without_proximal_log_probabilities_are_refused_by_the_buffer() -> None:
    # Open case C27: what has not gone through the policy has no behavior log-probabilities yet.
    group = one_group()
    samples = [copy_sample(rollout) for rollout in group.rollouts]
    for sample in samples:
        sample.sequences, sample.action_mask = sample.sequences[0], sample.action_mask[0]
    with pytest.raises(ValueError, match="has log-probabilities of shape None"):
        store_group(group, samples, engine_gap=False)
    stored, _ = birth(upstream_args(), group)
    assert all(sample.action_log_probs is None for sample in restore_samples(stored, log_probs=True))
