"""MoPPS against hand-worked posteriors, and prompts drawn through a selector."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openrlhf_ext.config import MoppsConfig, PoolConfig
from openrlhf_ext.prompt_pool import PromptPool
from openrlhf_ext.selection import Mopps, PromptSource, num_correct
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup


def posterior(mopps: Mopps, index: int) -> tuple[float, float]:
    state = mopps.state_dict()
    slot = state["index"].index(index)
    return state["alpha"][slot], state["beta"][slot]


def source_of(num_prompts: int, selector: Mopps | None = None) -> PromptSource:
    prompts = [Prompt(f"p{i}", f"text {i}", "") for i in range(num_prompts)]
    return PromptSource(prompts, PromptPool(num_prompts, 0, PoolConfig()), selector)


def group_of(prompt_id: str, accuracies: list[float]) -> RolloutGroup[str]:
    return RolloutGroup("g", Prompt(prompt_id, "", ""), tuple(Rollout(0.0, a, 1, "") for a in accuracies), 0)


def test_the_posterior_decays_by_visit() -> None:
    mopps = Mopps(10, 0, MoppsConfig())
    # Decay .5, 8 rollouts, from Beta(1, 1). 2 correct: .5 + .5 + 2 = 3, .5 + .5 + 6 = 7.
    mopps.observe(4, 2, 8)
    assert posterior(mopps, 4) == (3, 7)
    # 6 correct: 1.5 + .5 + 6 = 8, 3.5 + .5 + 2 = 6.
    mopps.observe(4, 6, 8)
    assert posterior(mopps, 4) == (8, 6)


def test_without_decay_the_posterior_counts_everything() -> None:
    mopps = Mopps(1, 0, MoppsConfig(decay=1.0))
    for _ in range(3):
        mopps.observe(0, 1, 4)
    assert posterior(mopps, 0) == (1 + 3, 1 + 9)


def test_the_candidates_nearest_to_the_target_are_chosen_in_their_order() -> None:
    mopps = Mopps(6, 0, MoppsConfig(decay=1.0))
    # Posteriors so sharp that a draw is the mean within .01: 0, .2, .45, .55, .8, 1.
    for index, accuracy in enumerate((0.0, 0.2, 0.45, 0.55, 0.8, 1.0)):
        mopps.observe(index, round(1_000_000 * accuracy), 1_000_000)
    assert mopps.choose([5, 3, 1, 0, 2], 2) == [3, 2]
    assert mopps.choose([5, 3, 1, 0, 2], 3) == [3, 1, 2]
    assert mopps.choose([5, 0], 3) == [5, 0]
    assert mopps.choose([], 3) == []


def test_of_unknown_prompts_each_is_chosen_equally_often() -> None:
    mopps = Mopps(4, 1, MoppsConfig())
    counts = np.bincount([index for _ in range(800) for index in mopps.choose([0, 1, 2, 3], 1)], minlength=4)
    # 800 x 1/4 = 200, standard deviation sqrt(800 x 3/16) = 12.2.
    assert np.all(np.abs(counts - 200) < 4 * 12.2)


def test_a_draw_explores_where_the_posterior_is_wide() -> None:
    # Prompt 0 is known to be at .3; prompt 1 is unknown, and within .2 of the target with probability .4.
    mopps = Mopps(2, 0, MoppsConfig(decay=1.0))
    mopps.observe(0, 300_000, 1_000_000)
    share = np.mean([mopps.choose([0, 1], 1) == [1] for _ in range(800)])
    assert abs(share - 0.4) < 3 * (0.4 * 0.6 / 800) ** 0.5


def test_a_restored_selector_goes_on_exactly() -> None:
    def go_on(mopps: Mopps, steps: range) -> list[list[int]]:
        chosen = []
        for step in steps:
            chosen.append(mopps.choose(range(30), 5))
            for index in chosen[-1]:
                mopps.observe(index, (index + step) % 9, 8)
        return chosen

    whole = go_on(Mopps(30, 7, MoppsConfig()), range(8))
    stopped, again = Mopps(30, 7, MoppsConfig()), Mopps(30, 0, MoppsConfig())
    first = go_on(stopped, range(3))
    again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert first + go_on(again, range(3, 8)) == whole


def test_the_state_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts 3, this run has 4; .*--data.prompt_dataset"):
        Mopps(4, 0, MoppsConfig()).load_state_dict(Mopps(3, 0, MoppsConfig()).state_dict())


def test_without_a_selector_prompts_come_in_the_order_of_the_pool() -> None:
    source = source_of(9)
    order = np.random.default_rng([0, 0]).permutation(9).tolist()
    assert [prompt.prompt_id for prompt in source.next_prompts(9)] == [f"p{index}" for index in order]


def test_without_a_selector_a_batch_larger_than_the_pool_repeats_it() -> None:
    source = source_of(5)
    order = [index for epoch in range(4) for index in np.random.default_rng([0, epoch]).permutation(5).tolist()]
    assert [prompt.prompt_id for prompt in source.next_prompts(17)] == [f"p{index}" for index in order[:17]]


def test_a_round_over_the_end_of_an_epoch_is_full_as_long_as_the_pool_has_others() -> None:
    source = source_of(20)
    for _ in range(10):
        source.start_step()
        assert [len(source.take(6)) for _ in range(3)] == [6, 6, 6]


def test_a_step_never_gets_a_prompt_twice_however_many_rounds_it_has() -> None:
    source = source_of(7)
    for _ in range(10):
        source.start_step()
        taken = [index for _ in range(4) for index in source.take(3)]
        assert 0 < len(taken) == len(set(taken)) <= 7


def test_candidates_that_are_not_chosen_return_unspent_with_the_next_epoch() -> None:
    # 4 candidates for each of 2: 16 prompts are two steps of candidates, 4 of them chosen.
    source = source_of(16, Mopps(16, 0, MoppsConfig(candidates=4)))
    chosen = []
    for num_deferred in (6, 0):
        source.start_step()
        chosen += source.take(2)
        # Of the 8 candidates 6 return; the second step's 8 end the epoch.
        assert source.pool.metrics()["pool/num_deferred"] == num_deferred
    assert (len(set(chosen)), source.pool.epoch) == (4, 1)
    assert {source.pool.status(index)[1].num_rollouts for index in range(16)} == {0}
    source.start_step()
    assert len(source.pool.take(16)) == 16


def test_a_selector_sees_the_fresh_groups_of_a_step_by_prompt() -> None:
    mopps = Mopps(5, 0, MoppsConfig())
    source_of(5, mopps).observe([group_of("p3", [1, 0, 0, 0]), group_of("p1", [1, 1, 0, 1])])
    assert (posterior(mopps, 3), posterior(mopps, 1)) == ((2, 4), (4, 2))
    assert mopps.state_dict()["index"] == [1, 3]


def test_partial_credit_is_not_correct_and_more_than_one_is() -> None:
    assert num_correct(group_of("p", [1.0, 0.99, 1.5, 0.0])) == 2


@pytest.mark.parametrize("num_prompts", [4, 5])
@pytest.mark.parametrize("stop", range(6))
def test_c37_stopped_at_any_step_two_passes_over_the_prompts_are_the_unbroken_ones(
    num_prompts: int, stop: int
) -> None:
    unbroken, first = source_of(num_prompts), source_of(num_prompts)
    wanted = [prompt.prompt_id for _ in range(num_prompts) for prompt in unbroken.next_prompts(2)]
    assert [wanted.count(f"p{i}") for i in range(num_prompts)] == [2] * num_prompts
    found = [prompt.prompt_id for _ in range(min(stop, num_prompts)) for prompt in first.next_prompts(2)]
    resumed = source_of(num_prompts)
    resumed.pool.load_state_dict(json.loads(json.dumps(first.pool.state_dict())))
    while len(found) < len(wanted):
        found += [prompt.prompt_id for prompt in resumed.next_prompts(2)]
    assert found == wanted
