"""Pilot-Commit on scripted engines: verdicts, budget, order, termination and where every rollout goes."""

from __future__ import annotations

import logging
from collections import Counter
from math import comb

import numpy as np
import pytest

from openrlhf_ext.config import GroupsConfig, PilotConfig, PoolConfig
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.pilot_commit import PilotCommitSampler
from openrlhf_ext.prompt_pool import PoolExhausted, PromptPool
from openrlhf_ext.selection import PromptSource
from openrlhf_ext.survivors import PilotBounds, Survivor, SurvivorBuffer, max_variance_subset
from openrlhf_ext.types import FailedRequest, Prompt, Rollout, RolloutGroup

N, N_PILOT = 12, 4
NEVER_EXCLUDE = PoolConfig(floor=1.0)


class ScriptedEngine:
    """Answers by ``outcome(prompt id, stage)``: the accuracies of a request, or a failure's reason."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.policy_version = 0
        self.calls = []
        self.group_ids = []

    def generate(self, requests):
        self.group_ids += [request.group_id for request in requests]
        assert requests, "an engine is not called for nothing"
        self.calls.append([(self.stage(request), request.prompt.prompt_id) for request in requests])
        return [self._answer(request) for request in requests]

    def stage(self, request):
        return "pilot" if request.num_rollouts == N_PILOT else "commit"

    def _answer(self, request):
        outcome = self.outcome(request.prompt.prompt_id, self.stage(request), request.num_rollouts)
        if isinstance(outcome, str):
            return FailedRequest(request, outcome, "scripted", 1, 10, retryable=outcome != "invalid_reward")
        payload = f"{self.stage(request)} v{self.policy_version}"
        rollouts = tuple(Rollout(float(a), float(a), 10, payload) for a in outcome)
        return RolloutGroup(request.group_id, request.prompt, rollouts, self.policy_version)


class Run:
    """A sampler with all around it, and a trainer's bookkeeping after every step."""

    def __init__(self, outcome, num_prompts=100, *, engine=None, pool=NEVER_EXCLUDE, groups=None, retries=1, **config):
        self.engine = engine or ScriptedEngine(outcome)
        self.ledger = RolloutLedger()
        prompts = [Prompt(f"p{i}", f"text {i}", "") for i in range(num_prompts)]
        self.source = PromptSource(prompts, PromptPool(num_prompts, 0, pool))
        config = {"n_pilot": N_PILOT, "p_lower": 0.25, "p_upper": 0.75, "prompts_per_round": 6, **config}
        self.sampler = PilotCommitSampler(
            self.engine,
            self.source,
            self.ledger,
            PilotConfig(**config),
            policy_version=lambda: self.engine.policy_version,
            group_size=N,
            batch_size=2,
            max_retries=retries,
            seed=0,
            groups=groups,
        )

    def step(self):
        """One train step; raises if any rollout is unaccounted for. Its counts are in ``fates``."""
        self.engine.calls.clear()
        step = self.sampler.sample_step()
        self.ledger.assign("trained_fresh", sum(len(group.rollouts) for group in step.kept))
        self.counts = self.ledger.close_step()
        prefix = "step/num_"
        self.fates = {key.removeprefix(prefix): n for key, n in self.counts.items() if key.startswith(prefix) and n}
        if step.kept:
            self.engine.policy_version += 1
        return step


def half(prompt_id, stage, n):
    return [1, 0] * (n // 2)


def hopeless(prompt_id, stage, n):
    return [0] * n


def random_outcomes(seed, *, failures=0.0):
    """Prompts of a fixed accuracy each, in all of [0, 1]; requests fail with a probability."""
    rng = np.random.default_rng(seed)

    def outcome(prompt_id, stage, n):
        if rng.random() < failures:
            return ("deadline", "engine_error", "invalid_reward")[int(rng.integers(3))]
        return (rng.random(n) < (int(prompt_id[1:]) % 11) / 10).astype(float).tolist()

    return outcome


# -- verdicts --


@pytest.mark.parametrize(("n", "lower", "upper"), [(4, 1, 3), (8, 1, 6), (16, 2, 12), (32, 4, 24)])
def test_the_default_thresholds_are_inclusive_counts(n, lower, upper):
    assert PilotBounds.of(PilotConfig(), n) == PilotBounds(lower, upper, n)


@pytest.mark.parametrize(
    ("p", "keeps"),
    [
        (0.05, (0.185, 0.337, 0.189, 0.074)),
        (0.25, (0.680, 0.900, 0.937, 0.975)),
        (0.5, (0.875, 0.961, 0.989, 0.999)),
        (0.75, (0.680, 0.633, 0.595, 0.568)),
        (0.95, (0.185, 0.057, 0.007, 0.000)),
    ],
)
def test_prompts_are_committed_as_often_as_the_binomial_says(p, keeps):
    for n, keep in zip((4, 8, 16, 32), keeps, strict=True):
        bounds = PilotBounds.of(PilotConfig(), n)
        verdicts = {c: bounds.verdict(c) for c in range(n + 1)}
        mass = sum(comb(n, c) * p**c * (1 - p) ** (n - c) for c, verdict in verdicts.items() if verdict == "commit")
        assert round(mass, 3) == keep


@pytest.mark.parametrize(("n", "solved"), [(4, 0.656), (8, 0.430), (16, 0.185), (32, 0.034)])
def test_one_pilot_takes_a_prompt_of_accuracy_09_for_solved_this_often(n, solved):
    bounds = PilotBounds.of(PilotConfig(), n)
    mass = sum(comb(n, c) * 0.9**c * 0.1 ** (n - c) for c in range(n + 1) if bounds.verdict(c) == "solved")
    assert round(mass, 3) == solved


def test_thresholds_are_exact_where_floating_point_is_not():
    # In floating point 0.07 x 100 > 7 and 0.29 x 100 < 29.
    assert PilotBounds.of(PilotConfig(p_lower=0.07, p_upper=0.29), 100) == PilotBounds(7, 29, 100)
    for tenths in range(11):
        bounds = PilotBounds.of(PilotConfig(p_lower=tenths / 10, p_upper=tenths / 10), 10)
        assert (bounds.lower, bounds.upper) == (tenths, tenths)


def test_every_count_has_its_verdict():
    bounds = PilotBounds.of(PilotConfig(p_solve=0.9), 10)
    # Lower ceil(1.25) = 2, upper floor(7.5) = 7, solved 9.
    verdicts = [bounds.verdict(c) for c in range(11)]
    assert verdicts == ["too_hard"] * 2 + ["commit"] * 6 + ["too_easy"] + ["solved"] * 2


def test_verdicts_change_the_pool_with_their_evidence():
    correct = {"p0": 0, "p1": 2, "p2": 4, "p3": 3}
    run = Run(
        lambda prompt, stage, n: [1] * correct[prompt] + [0] * (n - correct[prompt]),
        num_prompts=4,
        pool=PoolConfig(exclude_min_rollouts=4, exclude_min_visits=1, exclude_epochs=1, floor=0.0),
        p_upper=0.5,
        prompts_per_round=3,
        max_rounds=1,
    )
    run.step()
    run.source.start_step()
    judged = {i: run.source.pool.status(i) for i in range(4)}
    states = {"p0": "deferred", "p1": "active", "p2": "excluded", "p3": "skipped"}
    seen = [i for i, (_, evidence) in judged.items() if evidence.num_rollouts]
    assert len(seen) == 3
    for i in seen:
        assert judged[i][0] == states[f"p{i}"]
        assert (judged[i][1].policy_version, judged[i][1].num_correct) == (0, correct[f"p{i}"])


# -- one step --


def test_a_trained_group_is_its_pilots_then_its_commits_under_one_id():
    run = Run(half)
    first = run.step()
    # Empty buffer: round 1 pilots 6, round 2 commits 2 and pilots 6 for the next step.
    assert [Counter(stage for stage, _ in call) for call in run.engine.calls] == [
        {"pilot": 6},
        {"commit": 2, "pilot": 6},
    ]
    second = run.step()
    # One round from now on.
    assert [Counter(stage for stage, _ in call) for call in run.engine.calls] == [{"commit": 2, "pilot": 6}]
    pilots = {group.group_id: group for group in first.generated}
    for group in (*first.kept, *second.kept):
        assert len(group.rollouts) == N
        assert group.rollouts[:N_PILOT] == pilots[group.group_id].rollouts
        assert group.prompt == pilots[group.group_id].prompt
    assert [r.payload for r in second.kept[0].rollouts] == ["pilot v0"] * 4 + ["commit v1"] * 8
    assert {group.policy_version for group in second.kept} == {0}


def test_bound_commits_come_first_in_one_call():
    run = Run(half)
    run.step()
    assert [stage for stage, _ in run.engine.calls[1]] == ["commit"] * 2 + ["pilot"] * 6


def test_unbound_pilots_and_their_commits_are_two_calls_of_one_policy():
    run = Run(half, bind=False)
    for _ in range(4):
        version = run.engine.policy_version
        step = run.step()
        pilots, commits = run.engine.calls
        assert {stage for stage, _ in pilots} == {"pilot"}
        assert {stage for stage, _ in commits} == {"commit"}
        assert {prompt for _, prompt in commits} <= {prompt for _, prompt in pilots}
        assert {group.policy_version for group in step.kept} == {version}
        assert step.metrics["pilot/survivor_age_max"] == 0
    # 6 pilots passed, 2 were committed: those of the step before are stale.
    assert run.fates["pilot_stale"] == 4 * N_PILOT


def test_a_batch_is_never_more_than_full_and_has_no_prompt_twice():
    run = Run(random_outcomes(5), num_prompts=9)
    for _ in range(40):
        prompts = [group.prompt.prompt_id for group in run.step().kept]
        assert len(prompts) == len(set(prompts)) <= 2


# -- budget and termination --


def test_hopeless_prompts_end_the_step_at_the_cap_with_nothing_and_say_so(caplog):
    run = Run(hopeless, max_rounds=3)
    with caplog.at_level(logging.WARNING):
        step = run.step()
    assert (step.kept, step.num_rounds, len(run.engine.calls)) == ([], 3, 3)
    assert "0 of 2 informative groups after the cap of 3 rounds (--ext.pilot.max_rounds raises it)" in caplog.text
    assert run.fates == {"pilot_too_hard": 3 * 6 * N_PILOT}


def test_a_step_ends_when_it_has_tried_every_prompt_once(caplog):
    run = Run(hopeless, num_prompts=8)
    with caplog.at_level(logging.WARNING):
        step = run.step()
    assert Counter(prompt for call in run.engine.calls for _, prompt in call) == {f"p{i}": 1 for i in range(8)}
    assert step.num_rounds == len(run.engine.calls)
    assert "with no other prompt left" in caplog.text


def test_at_the_cap_the_step_trains_what_exists():
    run = Run(lambda prompt, stage, n: half(prompt, stage, n) if prompt == "p7" else [0] * n, 20, max_rounds=5)
    kept = [group.prompt.prompt_id for _ in range(4) for group in run.step().kept]
    assert set(kept) == {"p7"}


def test_solved_prompts_drain_the_pool_and_the_run_ends_with_a_report():
    once = PoolConfig(exclude_min_rollouts=4, exclude_min_visits=1, floor=0.0)
    run = Run(lambda prompt, stage, n: half(prompt, stage, n) if prompt == "p3" else [1] * n, 7, pool=once)
    # p3 alone is trained, once in every epoch.
    for _ in range(3):
        assert [group.prompt.prompt_id for group in run.step().kept] == ["p3"]
    assert run.source.pool.metrics()["pool/num_excluded"] == 6
    run.engine.outcome = lambda prompt, stage, n: [1] * n
    with pytest.raises(PoolExhausted) as caught:
        for _ in range(20):
            run.step()
    assert caught.value.report["excluded"] == 7
    run.ledger.close_step()


def test_prompts_that_wait_are_trained_before_an_empty_pool_ends_the_run():
    once = PoolConfig(exclude_min_rollouts=4, exclude_min_visits=1, floor=0.0)
    run = Run(half, 6, pool=once, prompts_per_round=6)
    run.step()
    for index in range(6):
        run.source.pool.report(index, "excluded", run.source.pool.status(index)[1])
    waiting = len(run.sampler.survivors)
    kept = 0
    with pytest.raises(PoolExhausted):
        while True:
            kept += len(run.step().kept)
    assert kept == waiting > 0


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("failures", [0.0, 0.2])
@pytest.mark.parametrize(("order", "seed"), [("random", 0), ("max_variance", 1), ("oldest", 2)])
def test_every_rollout_is_accounted_for_in_every_step(bind, failures, order, seed):
    # 23 prompts, 6 a round: the end of an epoch falls into rounds, and every 2 or 3 steps.
    run = Run(
        random_outcomes(seed, failures=failures),
        23,
        pool=PoolConfig(exclude_min_rollouts=8, exclude_min_visits=2, exclude_epochs=2, floor=0.3),
        bind=bind,
        order=order,
        max_rounds=3,
        max_age=2,
        max_survivors=5,
    )
    epochs = set()
    for _ in range(30):
        before = run.engine.policy_version
        step = run.step()  # The ledger balances, or this raises.
        failed = sum(count for fate, count in run.fates.items() if fate.startswith("failed_"))
        pilots, commits = (step.metrics[f"pilot/num_{stage}_rollouts"] for stage in ("pilot", "commit"))
        assert run.counts["step/rollouts_generated"] == pilots + commits + failed
        assert run.counts["budget/rollouts_waiting"] == len(run.sampler.survivors) * N_PILOT
        assert len(run.sampler.survivors) <= 5
        assert len({survivor.index for survivor in run.sampler.survivors.waiting}) == len(run.sampler.survivors)
        assert all(len(group.rollouts) == N for group in step.kept)
        assert all(before - group.policy_version <= (2 if bind else 0) for group in step.kept)
        epochs.add(run.source.pool.epoch)
    assert len(epochs) > 5
    assert len(set(run.engine.group_ids)) == len(run.engine.group_ids)
    assert run.ledger.as_dict()["fates"]["trained_fresh"] > 0


# -- survivors --


def test_pilots_of_exactly_the_age_bound_are_committed_and_older_ones_dropped_first():
    for age, stale in ((3, 0), (4, 4 * N_PILOT)):
        run = Run(half, max_age=3, prompts_per_round=3, max_survivors=9)
        run.step()
        assert len(run.sampler.survivors) == 4
        run.engine.policy_version = age
        step = run.step()
        assert run.fates.get("pilot_stale", 0) == stale
        assert step.metrics["pilot/survivor_age_max"] == (3 if age == 3 else 0)


def test_beyond_the_bound_the_oldest_survivors_are_dropped_and_counted():
    run = Run(half, max_survivors=7)
    run.step()
    # 12 pilots passed, 2 were committed, 7 may wait.
    assert (len(run.sampler.survivors), run.fates["pilot_overflow"]) == (7, 3 * N_PILOT)
    assert run.fates == {"pilot_overflow": 12, "trained_fresh": 2 * N}


def survivors_of(*counts):
    group = RolloutGroup("g", Prompt("p", "", ""), (), 0)
    return [Survivor(index, group, count, 4) for index, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("order", "drawn"),
    # Accuracies 1/4, 2/4, 3/4, 2/4, 1/4: variances 3/16, 1/4, 3/16, 1/4, 3/16; equal ones oldest first.
    [("oldest", [0, 1, 2]), ("max_variance", [0, 1, 3])],
)
def test_survivors_are_committed_in_the_order_asked_for(order, drawn):
    buffer = SurvivorBuffer(order, seed=0)
    buffer.waiting = survivors_of(1, 2, 3, 2, 1)
    assert [survivor.index for survivor in buffer.draw(3)] == drawn
    assert sorted(survivor.index for survivor in buffer.draw(9)) == sorted({0, 1, 2, 3, 4} - set(drawn))


def test_a_random_order_takes_every_survivor_equally_often_and_is_seeded():
    def draws(seed):
        buffer, drawn = SurvivorBuffer("random", seed), []
        for _ in range(600):
            buffer.waiting = survivors_of(1, 2, 3)
            drawn += [survivor.index for survivor in buffer.draw(1)]
        return drawn

    assert draws(1) == draws(1) != draws(2)
    # 600 / 3 = 200, standard deviation sqrt(600 x 2/9) = 11.5.
    assert all(abs(count - 200) < 4 * 11.5 for count in Counter(draws(1)).values())


def test_survivors_outlive_an_epoch_and_are_not_piloted_again_while_they_wait():
    run = Run(half, 8, prompts_per_round=8, max_age=100, max_survivors=8)
    for _ in range(15):
        waiting = {f"p{survivor.index}" for survivor in run.sampler.survivors.waiting}
        run.step()
        piloted = {prompt for stage, prompt in run.engine.calls[0] if stage == "pilot"}
        assert not piloted & waiting
    assert run.source.pool.epoch > 3


# -- diagnosis --


def test_commit_only_trains_whole_new_groups_and_counts_the_pilots():
    run = Run(half, commit_only=True, max_age=1)
    run.step()
    step = run.step()
    assert {r.payload for group in step.kept for r in group.rollouts} == {"commit v1"}
    assert {group.policy_version for group in step.kept} == {1}
    assert run.fates == {"trained_fresh": 2 * N, "pilot_unused_commit_only": 6 * N_PILOT}
    assert run.counts["budget/rollouts_waiting"] == 0


def test_a_subset_of_the_pilots_has_maximal_variance_and_the_commit_makes_up_for_the_rest():
    run = Run(lambda prompt, stage, n: ([1, 1, 1, 0] * 3)[:n], n_effective=2)
    step = run.step()
    for group in step.kept:
        assert len(group.rollouts) == N
        assert [rollout.accuracy for rollout in group.rollouts[:2]] == [1, 0]
        assert [rollout.payload[:6] for rollout in group.rollouts] == ["pilot "] * 2 + ["commit"] * 10
    assert run.fates["pilot_unused_subset"] == 2 * len(step.generated)
    assert run.counts["budget/rollouts_waiting"] == 2 * len(run.sampler.survivors)


@pytest.mark.parametrize(
    ("accuracies", "size", "chosen"),
    [
        ([1, 1, 1, 0, 0, 0], 4, [0, 1, 3, 4]),
        # An odd size has one wrong more; what one class lacks comes from the other.
        ([1, 1, 1, 0, 0, 0], 3, [0, 3, 4]),
        ([1, 0, 0, 0, 0, 0], 4, [0, 1, 2, 3]),
        ([1, 1, 1, 1, 1, 0], 4, [0, 1, 2, 5]),
        ([0, 1, 0, 1], 0, []),
    ],
)
def test_the_subset_is_half_correct_as_far_as_there_are_enough(accuracies, size, chosen):
    rollouts = [Rollout(a, a, 1, slot) for slot, a in enumerate(accuracies)]
    assert [rollout.payload for rollout in max_variance_subset(rollouts, size)] == chosen


def test_metrics_tell_the_stages_and_their_success_apart():
    # Even prompts pass and stay mixed, of the odd ones p1, p5, p9 .. pass and their commits do not vary.
    def outcome(prompt, stage, n):
        kind = int(prompt[1:]) % 4
        if kind == 3:
            return [0] * n
        return half(prompt, stage, n) if stage == "pilot" or kind != 1 else [1] * n

    run = Run(outcome, max_survivors=20)
    step = run.step()
    passed = sum(int(group.prompt.prompt_id[1:]) % 4 != 3 for group in step.generated)
    alone = sum(int(group.prompt.prompt_id[1:]) % 4 != 1 for group in step.kept)
    assert step.metrics == {
        "pilot/num_pilot_rollouts": 12 * 4,
        "pilot/num_commit_rollouts": 2 * 8,
        "pilot/num_committed_groups": 2,
        "pilot/num_survivors_waiting": passed - 2,
        "pilot/commit_frac": passed / 12,
        "pilot/too_hard_frac": (12 - passed) / 12,
        "pilot/too_easy_frac": 0,
        "pilot/solved_frac": 0,
        "pilot/precision": 1.0,
        "pilot/precision_commits_alone": alone / 2,
        "pilot/survivor_age_mean": 0,
        "pilot/survivor_age_max": 0,
    }


def test_trained_groups_without_spread_are_dropped_where_that_is_asked_for():
    def outcome(prompt, stage, n):
        return half(prompt, stage, n) if stage == "pilot" else [1] * n

    run = Run(outcome, commit_only=True, groups=GroupsConfig("drop"))
    step = run.step()
    assert (step.kept, run.fates["filtered_zero_variance"]) == ([], 2 * N)
    assert step.metrics["pilot/precision"] == 0


# -- failures --


def test_a_pilot_that_fails_once_is_sent_again_alone():
    failed = []

    def outcome(prompt, stage, n):
        if not failed:
            failed.append(prompt)
            return "engine_error"
        return half(prompt, stage, n)

    run = Run(outcome)
    step = run.step()
    assert run.engine.calls[1] == [("pilot", failed[0])]
    assert (step.num_retries, step.failed, run.fates["failed_engine_error"]) == (1, [], 1)
    assert len(step.kept) == 2


def test_a_pilot_that_fails_for_good_has_no_verdict_and_returns_with_the_next_epoch():
    run = Run(lambda prompt, stage, n: "invalid_reward" if prompt == "p0" else half(prompt, stage, n), 6, retries=0)
    step = run.step()
    assert [failure.request.prompt.prompt_id for failure in step.failed] == ["p0"]
    assert run.source.pool.status(0)[1].num_rollouts == 0
    again = set()
    for _ in range(3):
        run.step()
        again |= {prompt for call in run.engine.calls for _, prompt in call}
    assert "p0" in again
    run = Run(lambda prompt, stage, n: "invalid_reward", 7, retries=0, max_rounds=1)
    run.step()
    assert run.source.pool.metrics()["pool/num_deferred"] == 6


def test_a_commit_that_fails_for_good_takes_its_pilots_along_and_another_prompt_its_place():
    broken = []

    def outcome(prompt, stage, n):
        if stage == "commit" and (not broken or prompt in broken):
            broken.append(prompt)
            return "deadline"
        return half(prompt, stage, n)

    run = Run(outcome, retries=2)
    step = run.step()
    assert [failure.request.prompt.prompt_id for failure in step.failed] == [broken[0]]
    assert (step.num_retries, len(step.kept)) == (2, 2)
    assert broken[0] not in {group.prompt.prompt_id for group in step.kept}
    assert (run.fates["pilot_commit_failed"], run.fates["failed_deadline"]) == (N_PILOT, 3)


def test_an_engine_that_never_answers_ends_the_step_at_the_cap():
    run = Run(lambda prompt, stage, n: "engine_error", max_rounds=2)
    step = run.step()
    assert (step.kept, step.generated, len(step.failed), step.num_prompts) == ([], [], 12, 12)
    assert run.fates == {"failed_engine_error": 2 * 12}
