"""The prompt pool: the order of draws, what takes a prompt out and brings it back, and the exact state."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openrlhf_ext.config import PoolConfig
from openrlhf_ext.prompt_pool import Evidence, PoolExhausted, PromptPool

AT_ONCE = PoolConfig(exclude_min_rollouts=1, exclude_min_visits=1, floor=0.0)
SOLVED, FAILED = Evidence(3, 4, 4), Evidence(3, 0, 4)


def pool_of(num_prompts: int, config: PoolConfig = AT_ONCE, seed: int = 0) -> PromptPool:
    return PromptPool(num_prompts, seed, config)


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(num_prompts).tolist()


def copy(pool: PromptPool, num_prompts: int, config: PoolConfig = AT_ONCE) -> PromptPool:
    again = pool_of(num_prompts, config)
    again.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    return again


@pytest.mark.parametrize("seed", range(5))
def test_without_evidence_the_sequence_is_that_of_seeded_permutations(seed: int) -> None:
    pool, rng = pool_of(7, seed=seed), np.random.default_rng(seed)
    taken: list[int] = []
    while len(taken) < 70:
        taken += pool.take(int(rng.integers(0, 12)))
        assert pool.epoch == len(taken) // 7
    assert taken[:70] == [index for epoch in range(10) for index in epoch_order(7, seed, epoch)]


def test_a_round_goes_over_the_end_of_an_epoch_but_never_has_a_prompt_twice() -> None:
    pool = pool_of(5)
    first, second = epoch_order(5, 0, 0), epoch_order(5, 0, 1)
    assert first[:3] + first[3:] + second[:1] == [*pool.take(3), *pool.take(2), *pool.take(1)]
    pool = pool_of(5)
    pool.take(3)
    # The round ends before the first prompt that it has: the sequence stays whole.
    crossing = pool.take(5)
    assert crossing[:2] == first[3:]
    assert len(crossing) == len(set(crossing)) < 5
    assert crossing[2:] + pool.take(5 - len(crossing[2:])) == second


def test_a_prompt_in_use_is_passed_over_until_the_next_epoch() -> None:
    pool = pool_of(4)
    order = epoch_order(4, 0, 0)
    assert pool.take(2, pass_over=[order[0]]) == order[1:3]
    assert pool.status(order[0])[0] == "deferred"
    assert pool.take(1) == order[3:]
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


def test_where_all_prompts_are_in_use_a_round_is_empty_and_ends() -> None:
    assert pool_of(3).take(3, pass_over=[0, 1, 2]) == []


@pytest.mark.parametrize("state", ["active", "deferred", "skipped"])
def test_a_verdict_on_a_drawn_prompt_holds_until_the_next_epoch_with_its_evidence(state: str) -> None:
    pool = pool_of(3)
    index, *_ = pool.take(2)
    assert pool.report(index, state, FAILED) == state
    assert pool.status(index) == (state, FAILED)
    pool.take(1)
    assert pool.status(index) == ("active", FAILED)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_a_verdict_that_comes_after_the_end_of_its_epoch_takes_nothing_from_the_next() -> None:
    pool = pool_of(3)
    drawn = pool.take(3)
    assert pool.epoch == 1
    for index in drawn:
        pool.report(index, "deferred", FAILED)
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.epoch == 2


def test_every_prompt_is_in_one_state() -> None:
    pool = pool_of(6)
    drawn = pool.take(4)
    for index, state in zip(drawn, ("active", "deferred", "skipped", "excluded"), strict=True):
        pool.report(index, state, SOLVED)
    counts = {"pool/num_active": 3, "pool/num_deferred": 1, "pool/num_skipped": 1, "pool/num_excluded": 1}
    assert pool.metrics() == counts


def test_an_excluded_prompt_is_never_drawn_again_and_the_others_once_an_epoch() -> None:
    pool = pool_of(5)
    out, *_ = pool.take(5)
    assert pool.report(out, "excluded", SOLVED) == "excluded"
    for _ in range(4):
        assert sorted(pool.take(4)) == sorted(set(range(5)) - {out})


def test_exclusion_takes_enough_rollouts_in_enough_epochs_without_a_failure() -> None:
    config = PoolConfig(exclude_min_rollouts=12, exclude_min_visits=2, floor=0.0)

    def granted(reports: str) -> list[str]:
        pool, states = pool_of(1, config), []
        for report in reports:
            pool.take(1)
            states.append(pool.report(0, "excluded" if report == "s" else "active", SOLVED))
        return states

    # 4 rollouts each: 12 in the third epoch; a failure starts the count again.
    assert granted("sss") == ["skipped", "skipped", "excluded"]
    assert granted("ssfss") == ["skipped", "skipped", "active", "skipped", "skipped"]


def test_many_rollouts_of_one_epoch_are_one_visit() -> None:
    pool = pool_of(2, PoolConfig(exclude_min_rollouts=4, exclude_min_visits=2, floor=0.0))
    index, *_ = pool.take(1)
    assert [pool.report(index, "excluded", SOLVED) for _ in range(5)] == ["skipped"] * 5


def test_false_exclusion_is_as_rare_as_the_number_of_solved_rollouts_makes_it() -> None:
    # A prompt of accuracy 0.9 and pilots of 4: one is solved with probability .9^4 = .656, the 4 visits that
    # 16 rollouts take with .9^16 = .185.
    rng, trials = np.random.default_rng(0), 2000
    for config, visits, probability in ((AT_ONCE, 1, 0.9**4), (PoolConfig(floor=0.0), 4, 0.9**16)):
        pool = pool_of(trials, config)
        for _ in range(visits):
            for index in pool.take(trials):
                correct = int(rng.binomial(4, 0.9))
                pool.report(index, "excluded" if correct == 4 else "active", Evidence(0, correct, 4))
        # Three standard errors of the share.
        error = abs(pool.metrics()["pool/num_excluded"] / trials - probability)
        assert error < 3 * (probability * (1 - probability) / trials) ** 0.5


def test_an_exclusion_expires_and_one_more_solved_visit_renews_it() -> None:
    pool = pool_of(2, PoolConfig(exclude_min_rollouts=8, exclude_min_visits=2, exclude_epochs=2, floor=0.0))
    for _ in range(2):
        pool.take(2)
        state = pool.report(0, "excluded", SOLVED)
    assert state == "excluded"
    # Excluded in epoch 1, after its draw: absent from epochs 2 and 3, back in epoch 4.
    assert [pool.take(1) for _ in range(2)] == [[1], [1]]
    assert sorted(pool.take(2)) == [0, 1]
    assert pool.report(0, "excluded", SOLVED) == "excluded"


def test_the_pool_never_shrinks_below_its_floor() -> None:
    # 30 % of 10 is 3: 7 exclusions are granted.
    pool = pool_of(10, PoolConfig(exclude_min_rollouts=1, exclude_min_visits=1, floor=0.3))
    states = [pool.report(index, "excluded", SOLVED) for index in pool.take(10)]
    assert states == ["excluded"] * 7 + ["skipped"] * 3
    assert [len(set(pool.take(9))) for _ in range(3)] == [3, 3, 3]


def test_an_expired_exclusion_leaves_room_for_another() -> None:
    # Half of 4 may be excluded at a time.
    pool = pool_of(4, PoolConfig(exclude_min_rollouts=1, exclude_min_visits=1, exclude_epochs=2, floor=0.5))
    first = pool.take(4)[:2]
    assert [pool.report(index, "excluded", SOLVED) for index in first] == ["excluded"] * 2
    others = pool.take(2)
    assert [pool.report(index, "excluded", SOLVED) for index in others] == ["skipped"] * 2
    assert sorted(pool.take(2)) == sorted(others)
    assert sorted(pool.take(4)) == [0, 1, 2, 3]
    for index in first:
        pool.report(index, "active", FAILED)
    assert [pool.report(index, "excluded", SOLVED) for index in others] == ["excluded"] * 2
    assert pool.report(first[0], "excluded", SOLVED) == "skipped"


def test_a_pool_with_nothing_left_says_why() -> None:
    pool = pool_of(3)
    for index in pool.take(3):
        pool.report(index, "excluded", SOLVED)
    with pytest.raises(PoolExhausted, match="all 3 are excluded for good.*--ext.pool.exclude_epochs") as caught:
        pool.take(1)
    assert caught.value.report == {"active": 0, "deferred": 0, "skipped": 0, "excluded": 3}


def test_where_all_are_excluded_for_a_while_the_first_epoch_with_a_prompt_comes_at_once() -> None:
    pool = pool_of(3, PoolConfig(exclude_min_rollouts=1, exclude_min_visits=1, exclude_epochs=7, floor=0.0))
    for index in pool.take(3):
        pool.report(index, "excluded", SOLVED)
    assert sorted(pool.take(3)) == [0, 1, 2]


@pytest.mark.parametrize("stop", range(12))
def test_a_restored_pool_goes_on_exactly_even_within_an_epoch(stop: int) -> None:
    config = PoolConfig(exclude_min_rollouts=4, exclude_min_visits=1, exclude_epochs=2, floor=0.3)
    states = ("active", "deferred", "skipped", "excluded")

    def go_on(pool: PromptPool, steps: range) -> list[object]:
        log: list[object] = []
        for step in steps:
            for index in (drawn := pool.take(4, pass_over=[step % 9])):
                log.append(pool.report(index, states[(step + index) % 4], SOLVED))
            log += [drawn, pool.epoch, pool.metrics(), [pool.status(index) for index in range(9)]]
        return log

    whole = go_on(pool_of(9, config), range(12))
    stopped = pool_of(9, config)
    first = go_on(stopped, range(stop))
    assert first + go_on(copy(stopped, 9, config), range(stop, 12)) == whole


def test_the_state_is_small_while_nothing_is_known() -> None:
    pool = pool_of(1000)
    pool.take(10)
    assert len(json.dumps(pool.state_dict())) < 200


def test_the_state_of_other_data_or_another_seed_is_refused() -> None:
    state = pool_of(4, seed=9).state_dict()
    with pytest.raises(ValueError, match="num_prompts 4, this run has 5; .*--data.prompt_dataset"):
        pool_of(5, seed=9).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 9, this run has 8; .*--train.seed"):
        pool_of(4, seed=8).load_state_dict(state)


def test_a_pool_needs_prompts_and_a_seed_that_is_not_negative() -> None:
    with pytest.raises(ValueError, match="at least one prompt, got 0"):
        pool_of(0)
    with pytest.raises(ValueError, match="--train.seed must not be negative, got -1"):
        pool_of(1, seed=-1)
