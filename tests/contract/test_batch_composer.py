"""A composed batch over several steps: which rows, with whose advantages and log-probabilities, and every one counted.

Groups of 4 with one success: advantages 0.75 / 0.5 = 1.5 and -0.25 / 0.5 = -0.5. Rows are recognized by their tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import TinyPolicy, actor_group
from openrlhf.trainer.ppo_utils.experience import Experience
from recorded import upstream_args
from replayed import SMALL, ComposedRun
from test_parity import assert_equal

from openrlhf_ext.adapters.experience_maker import plan_training
from openrlhf_ext.adapters.generation import unify_info
from openrlhf_ext.adapters.replayed_rows import ORIGIN, ORIGINS, copy_sample
from openrlhf_ext.config import FillConfig, GroupsConfig, ReplayConfig, SuccessReplayConfig, ThrottleConfig
from openrlhf_ext.types import RolloutGroup

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("local_ray")]

KEEP, DROP = GroupsConfig(), GroupsConfig(ineffective="drop")


def tokens(row: Experience) -> tuple[int, ...]:
    return tuple(row.sequences.tolist())


def origins(rows: Sequence[Experience]) -> list[str]:
    return [ORIGINS[int(row.info[ORIGIN])] for row in rows]


def plain_rows(run: ComposedRun, groups: Sequence[RolloutGroup[Experience]]) -> list[Experience]:
    """What the experience maker makes of groups under the current policy."""
    samples = [copy_sample(rollout) for group in groups for rollout in group.rollouts]
    unify_info(samples)  # as before any replay: numbers of verifiers, the same ones in every row
    return run.maker.make_rows(samples)


def without_origin(rows: Sequence[Experience]) -> list[Experience]:
    return [
        replace(row, info={key: row.info[key].float() for key in sorted(row.info) if key != ORIGIN}) for row in rows
    ]


def traced(folder: Path, step: int, origin: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "replay.jsonl").read_text().splitlines()]
    return [birth for line in lines if (line["step"], line["origin"]) == (step, origin) for birth in line["groups"]]


def assert_trained_as(row: Experience, born: Experience, objective: str, policy: int, cap: float) -> float:
    """The row has the advantage and the center of its objective; the largest move of a log-probability since birth."""
    on = row.action_mask.bool()
    behavior = born.action_log_probs[on]
    proximal = TinyPolicy(policy)(row.sequences[None], row.action_mask[None], None)[0][on].detach()
    weight = (proximal - behavior).exp().clamp(max=cap) if objective == "decoupled" else torch.ones_like(behavior)
    torch.testing.assert_close(row.advantages[on], born.advantages[on] * weight, atol=1e-6, rtol=1e-5)
    center = behavior if objective == "behavior_clip" else proximal
    torch.testing.assert_close(row.action_log_probs[on], center, atol=1e-6, rtol=0)
    return float((proximal - behavior).abs().max())


# -- off --


@pytest.mark.parametrize("groups", [None, KEEP], ids=["null", "keep"])
@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce_baseline", "gae"])
def test_with_all_parts_off_a_step_has_the_rows_of_the_experience_maker_and_leaves_nothing(
    estimator: str, groups: GroupsConfig | None, tmp_path: Path
) -> None:
    args = upstream_args(estimator, *SMALL, "--algo.kl.init_coef", "0.01")
    run = ComposedRun(args, tmp_path, groups=groups)
    for _ in range(2):
        fresh = run.groups("MMWR")
        expected = plain_rows(run, fresh)
        batch = run.step(fresh)
        assert_equal(batch.rows, expected)
        assert batch.fresh_groups == fresh and batch.metrics == {} and batch.copies == []
        assert not any(ORIGIN in row.info for row in batch.rows)
        assert run.metrics["step/num_trained_fresh"] == 16 and run.metrics["step/num_replayed"] == 0
    assert not run.composer.holds_anything and list(tmp_path.iterdir()) == []


# -- rollout replay --


@pytest.mark.parametrize("objective", ["behavior_clip", "decoupled", "on_policy"])
def test_drawn_rollouts_keep_the_advantage_of_their_birth_and_come_after_all_fresh_ones(
    objective: str, tmp_path: Path
) -> None:
    config = ReplayConfig(warmup_steps=0, max_age=2, objective=objective, weight_cap=2.0)
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, groups=DROP, replay=config)
    born: dict[tuple[int, ...], tuple[int, Experience]] = {}
    ages, moves = set(), []
    for version in range(6):
        fresh = run.groups("MMMW")
        expected = plain_rows(run, fresh[:3])
        batch = run.step(fresh)
        assert_equal(without_origin(batch.fresh), without_origin(expected))
        assert origins(batch.rows) == ["fresh"] * 12 + ["rollout_replay"] * (6 if version else 0)  # 0.5 * 12
        for row in batch.replayed:
            birth, old = born[tokens(row)]
            ages.add(version - birth)
            moves.append(assert_trained_as(row, old, objective, version, cap=2.0))
        born |= {tokens(row): (version, row) for row in batch.fresh}
    assert len(born) == 6 * 12  # no two rollouts have the same tokens
    # Evicted before the draw: age 3 would be stored until then. Stored after it: never age 0.
    assert ages == {1, 2} and max(moves) > 1.0


def test_priority_weights_multiply_the_advantage(tmp_path: Path) -> None:
    # With alpha = beta = 1 a rollout's weight is min |A| / |A|: 1.5 becomes 0.5, and -0.5 stays.
    config = ReplayConfig(warmup_steps=0, alpha=1.0, beta=1.0, ratio=1.0)
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, groups=KEEP, replay=config)
    rows = run.steps("MMMM", "MMMM")[1].replayed
    found = [float(row.advantages[row.action_mask.bool()][0]) for row in rows]
    assert sorted(found) == pytest.approx([-0.5] * 12 + [0.5] * 4, abs=1e-5)


def test_a_step_without_groups_draws_nothing_and_lets_rollouts_age(tmp_path: Path) -> None:
    config = ReplayConfig(warmup_steps=0, max_age=1)
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, groups=KEEP, replay=config)
    run.steps("MMMM")
    for stored, evicted in ((16, 0), (0, 16)):
        assert run.step([]).rows == [] and run.metrics["rollout_replay/no_anchor"] == 1
        assert run.metrics["rollout_buffer/num_rollouts"] == stored
        assert run.metrics["rollout_buffer/num_evicted_age"] == evicted


def test_where_no_request_gave_a_group_filling_fills_all_slots_and_replay_stays_out(tmp_path: Path) -> None:
    replay = ReplayConfig(warmup_steps=0)
    run = ComposedRun(
        upstream_args("group_norm", *SMALL), tmp_path, groups=KEEP, fill=FillConfig(max_frac=0.5), replay=replay
    )
    run.steps("MMMM")
    assert origins(run.step([]).rows) == ["replay"] * 8
    assert run.metrics["rollout_replay/num_drawn"] == 0 and run.metrics["step/num_replayed"] == 8


# -- filling and rollout replay together --


@pytest.mark.parametrize("log_probs", [True, False])
def test_together_no_group_is_taken_twice_and_every_row_is_trained_by_its_own_origin(
    log_probs: bool, tmp_path: Path
) -> None:
    # A ratio of 10 draws all that is there, so that a group that filling has taken would be drawn again, too.
    fill, replay = FillConfig(max_frac=0.25, weight_cap=2.0), ReplayConfig(warmup_steps=0, ratio=10.0)
    args = upstream_args("group_norm", *SMALL)
    run = ComposedRun(args, tmp_path, groups=KEEP, fill=fill, replay=replay, log_probs=log_probs)
    run_born: dict[tuple[int, ...], Experience] = {}
    for version in range(4):
        fresh = run.groups("MMWR")
        for rollout in fresh[0].rollouts if version == 1 else ():
            rollout.payload.info["format"] = torch.tensor([1.0])
        batch = run.step(fresh)
        # One of two slots is filled; of the 2 groups that each step stores, that one is not drawn.
        num_filled, num_drawn = (4, 8 * version - 4) if version else (0, 0)
        assert origins(batch.rows) == (
            ["fresh"] * (16 - num_filled) + ["replay"] * num_filled + ["rollout_replay"] * num_drawn
        )
        assert run.metrics["step/num_replayed"] == num_filled + num_drawn
        for row in batch.replayed[:num_filled]:
            assert_trained_as(row, run_born[tokens(row)], "decoupled", version, cap=2.0)
        for row in batch.replayed[num_filled:]:
            assert_trained_as(row, run_born[tokens(row)], "behavior_clip", version, cap=1.0)
        assert len({tuple(row.info) for row in batch.rows}) == 1
        num_formatted = sum(float(row.info["format"]) for row in batch.rows) if version else 0
        assert num_formatted == (4 if version else 0)  # fresh in step 2, replayed since
        assert {row.rollout_log_probs is not None for row in batch.rows} == {log_probs}
        run_born |= {tokens(row): row for row in batch.fresh}
        if version:
            filled, drawn = (traced(tmp_path, version + 1, origin) for origin in ("replay", "rollout_replay"))
            assert [one["rollouts"] for one in filled] == [4] and filled[0]["born_step"] == version
            assert len(drawn) == 2 * version - 1 and filled[0]["group_id"] not in {one["group_id"] for one in drawn}


def test_the_throttle_shrinks_filling_and_replay_after_a_bad_step_and_both_recover(tmp_path: Path) -> None:
    # The policy moves once, after the first step; rollouts of age 1 are from before it in the second step only.
    throttle = ThrottleConfig(
        max_row_frac=None, min_effective_sample_frac=None, max_behavior_kl=0.1, shrink=0.5, recover=0.25
    )
    run = ComposedRun(
        upstream_args("group_norm", *SMALL, "--rollout.batch_size", "8"),
        tmp_path,
        policies=[0] + [1] * 9,
        groups=KEEP,
        fill=FillConfig(max_frac=0.25),
        replay=ReplayConfig(warmup_steps=0, max_age=1),
        throttle=throttle,
    )
    found = []
    for _ in range(5):
        rows = run.step(run.groups("MMMMWWWW")).rows
        found.append((origins(rows).count("replay") // 4, origins(rows).count("rollout_replay")))
        found[-1] += (run.metrics["throttle/share"],)
    # Of 0.25 * 8 slots and 0.5 * 16 rollouts: all, then a half, three quarters (1.5 slots are 2), all.
    assert found == [(0, 0, 1.0), (2, 8, 0.5), (1, 4, 0.75), (2, 6, 1.0), (2, 8, 1.0)]


# -- pool composition --


@pytest.mark.parametrize("granularity", ["rollout", "group"])
def test_a_pool_trains_as_many_rows_of_fresh_and_stored_ones_together(granularity: str, tmp_path: Path) -> None:
    config = ReplayConfig(warmup_steps=0, composition="pool", granularity=granularity)
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, groups=DROP, replay=config)
    not_drawn = 0
    for version in range(6):
        batch = run.step(run.groups("MMMMW"))
        # 16 informative rollouts in 4 groups: 1.5 * 16 = 24, or 1.5 * 4 = 6 groups of 4.
        assert len(batch.rows) == (24 if version else 16)
        assert origins(batch.rows) == ["fresh"] * len(batch.fresh) + ["rollout_replay"] * len(batch.replayed)
        kept = {id(row) for row in batch.fresh}
        assert [row for row in batch.fresh_group_rows if id(row) in kept] == batch.fresh
        fates = {name: run.metrics[f"step/num_{name}"] for name in ("trained_fresh", "pool_not_drawn")}
        assert fates == {"trained_fresh": len(batch.fresh), "pool_not_drawn": 16 - len(batch.fresh)}
        assert run.metrics["step/num_filtered_zero_variance"] == 4
        assert run.metrics["step/num_replayed"] == len(batch.replayed)
        assert run.metrics["rollout_buffer/num_rollouts"] == 16 * (version + 1)  # drawn or not
        not_drawn += fates["pool_not_drawn"]
    assert not_drawn > 0


# -- success replay --


@pytest.mark.parametrize("flags", [(), ("--algo.advantage.is_correction_level", "token")], ids=["plain", "corrected"])
def test_an_old_success_is_trained_as_a_rollout_of_its_new_group(flags, tmp_path: Path, monkeypatch) -> None:
    args = upstream_args("group_norm", *SMALL, *flags)
    run = ComposedRun(args, tmp_path, groups=KEEP, success_replay=SuccessReplayConfig())
    counted = []
    monkeypatch.setattr(run.ledger, "replayed", lambda number, **at: counted.append((number, at)))
    run.step([])
    old = run.step(run.groups("MW", "ab")).fresh[0]
    run.step([])
    for step in (4, 5):
        groups = run.groups("WM", "ab" if step == 4 else "ac")
        batch = run.step(groups)
        first, *others = batch.fresh[:4]
        assert tokens(first) == tokens(old) and groups[0].rewards() == [0.0] * 4
        assert [tokens(row) for row in others] == [tokens(plain) for plain in plain_rows(run, groups)[1:4]]
        for row, advantage in zip(batch.fresh[:4], (1.5, -0.5, -0.5, -0.5), strict=True):
            on = row.action_mask.bool()
            torch.testing.assert_close(row.advantages[on], torch.full((int(on.sum()),), advantage))
        # On-policy: neither its center nor OpenRLHF's mismatch correction knows who sampled it.
        current = TinyPolicy(step - 1)(first.sequences[None], first.action_mask[None], None)[0].detach()
        torch.testing.assert_close(first.action_log_probs, current)
        assert (current - old.action_log_probs).abs().max() > 0.1
        assert torch.equal(first.rollout_log_probs, first.action_log_probs)
        assert all(not torch.equal(row.rollout_log_probs, row.action_log_probs) for row in others)
        assert not any(ORIGIN in row.info for row in batch.rows)
        assert (run.metrics["step/num_replaced_by_success"], run.metrics["step/num_trained_fresh"]) == (1, 7)
        # Of prompts a, b, c one each; the mixed group's is not stored again.
        assert run.metrics["success_replay/num_rollouts"] == step - 2
    assert counted == [(1, {"born": 2, "step": 4}), (1, {"born": 2, "step": 5})]


def test_successes_of_groups_that_are_dropped_are_stored_all_the_same(tmp_path: Path) -> None:
    args = upstream_args("group_norm", *SMALL)
    run = ComposedRun(args, tmp_path, groups=DROP, success_replay=SuccessReplayConfig())
    assert run.step(run.groups("RW", "ab")).rows == []
    assert run.metrics["step/num_filtered_zero_variance"] == 8 and run.metrics["success_replay/num_rollouts"] == 4
    batch = run.step(run.groups("WW", "ab"))
    assert [group.prompt.prompt_id for group in batch.fresh_groups] == ["a"] and len(batch.rows) == 4
    assert run.metrics["step/num_filtered_zero_variance"] == 4


# -- every rollout is counted --


PARTS = {
    "off": {},
    "fill": {"fill": FillConfig(max_frac=0.75)},
    "fill all": {"fill": FillConfig(store="all", min_age=2)},
    "replay": {"replay": ReplayConfig(warmup_steps=2, max_age=3)},
    "both": {"fill": FillConfig(), "replay": ReplayConfig(warmup_steps=2), "throttle": ThrottleConfig()},
    "success": {"success_replay": SuccessReplayConfig()},
}
POOL = {"replay": ReplayConfig(warmup_steps=0, composition="pool")}
CASES = [(f"{name}, {g.ineffective}", parts | {"groups": g}) for name, parts in PARTS.items() for g in (KEEP, DROP)]
CASES += [("pool, drop", POOL | {"groups": DROP})]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("parts", [parts for _, parts in CASES], ids=[name for name, _ in CASES])
def test_over_random_steps_the_ledger_balances_and_counts_exactly_what_is_trained(parts, seed, tmp_path) -> None:
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, **parts)
    rng = random.Random(seed)
    for _ in range(30):
        patterns = rng.choices("MRW", k=rng.randint(0, 4))
        batch = run.step(run.groups("".join(patterns), "".join(rng.choices("abcdef", k=4))))
        num_mixed = run.metrics["step/num_replaced_by_success"]
        assert run.metrics["step/num_trained_fresh"] == len(batch.fresh) - num_mixed
        assert run.metrics["step/num_replayed"] == len(batch.replayed) + num_mixed
        assert len({tuple(row.info) for row in batch.rows}) <= 1
    counts = run.ledger.as_dict()
    assert counts["generated"] == sum(counts["fates"].values()) and counts["waiting"] == 0
    assert (counts["replayed"] > 0) == run.composer.holds_anything


# -- what ends a run, and the plan --


def test_log_probabilities_that_are_not_finite_end_the_run_with_the_reason(tmp_path: Path) -> None:
    run = ComposedRun(upstream_args("group_norm", *SMALL), tmp_path, groups=KEEP)
    groups = run.groups("MMMM")
    broken = TinyPolicy()
    broken.logits.data[3] = torch.nan  # of whatever follows token 3
    run.maker.actor_model_group = actor_group(broken)
    rows = plain_rows(run, groups)
    count = sum(bool((row.sequences[:-1][row.action_mask.bool()] == 3).any()) for row in rows)
    assert 0 < count < 16
    reason = f"not finite in {count} of 16 rollouts: training has diverged; lower --actor.adam.lr"
    with pytest.raises(RuntimeError, match=reason):
        run.step(groups)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_optimizer_steps"),
    # 16 x 8 = 128 rows are planned; 128 replayed ones make the optimizer's batches larger.
    [(192, 128, 1), (256, 128, 1), (128, 64, 2), (256, 64, 2), (64, 64, 1)],
)
def test_replayed_rows_make_no_further_optimizer_steps(num_rows: int, batch_size: int, num_optimizer_steps: int):
    args = upstream_args("group_norm", "--train.batch_size", str(batch_size))
    rows = [SimpleNamespace(total_length=torch.tensor([8.0]))] * num_rows
    plan = plan_training(rows, args, num_ranks=2, rng=np.random.default_rng(0))
    assert [len(rank) for rank in plan] == [num_optimizer_steps] * 2
