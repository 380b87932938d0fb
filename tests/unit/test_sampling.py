"""The sampling loop on a scripted engine: budget, order, termination and where every rollout goes."""

import pytest

from openrlhf_ext.config import DapoConfig, GroupsConfig
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.sampling import GroupSampler
from openrlhf_ext.types import FailedRequest, Prompt, Rollout, RolloutGroup

N = 4
MIXED, RIGHT, WRONG = [1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]


class ScriptedEngine:
    """Answers each prompt with the next of its scripted outcomes: rewards, or a failure reason."""

    def __init__(self, outcomes):
        self.outcomes = {key: list(value) for key, value in outcomes.items()}
        self.calls = []

    def generate(self, requests):
        self.calls.append([request.prompt.prompt_id for request in requests])
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        script = self.outcomes[request.prompt.prompt_id]
        outcome = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(outcome, str):
            return FailedRequest(request, outcome, "scripted", 3, 30, retryable=outcome != "invalid_reward")
        rollouts = tuple(Rollout(float(r), float(r), 10, "text") for r in outcome)
        return RolloutGroup(request.group_id, request.prompt, rollouts, policy_version=0)


def sampler_for(outcomes, order, *, batch_size=2, max_retries=1, groups=None, dapo=None):
    engine, ledger = ScriptedEngine(outcomes), RolloutLedger()
    prompts = iter([Prompt(prompt_id, f"text {prompt_id}", "") for prompt_id in order])
    sampler = GroupSampler(
        engine,
        lambda count: [next(prompts) for _ in range(count)],
        ledger,
        group_size=N,
        batch_size=batch_size,
        max_retries=max_retries,
        groups=groups,
        dapo=dapo,
    )
    return sampler, engine, ledger


def finish(step, ledger):
    """What the trainer does with the kept groups; raises if any rollout is unaccounted for."""
    ledger.assign("trained_fresh", sum(len(group.rollouts) for group in step.kept))
    return {key: count for key, count in ledger.close_step().items() if key.startswith("step/num_") and count}


def kept(step):
    return [group.prompt.prompt_id for group in step.kept]


def test_plain_grpo_keeps_every_group_in_prompt_order():
    sampler, _, ledger = sampler_for({"a": [RIGHT], "b": [MIXED]}, "ab", groups=GroupsConfig())
    step = sampler.sample_step()
    assert kept(step) == ["a", "b"]
    assert finish(step, ledger) == {"step/num_trained_fresh": 2 * N}


def test_filter_drops_zero_variance_groups_and_counts_them():
    sampler, engine, ledger = sampler_for({"a": [RIGHT], "b": [MIXED]}, "ab", groups=GroupsConfig(ineffective="drop"))
    step = sampler.sample_step()
    assert kept(step) == ["b"]
    assert len(step.generated) == 2
    assert finish(step, ledger) == {"step/num_trained_fresh": N, "step/num_filtered_zero_variance": N}
    assert len(engine.calls) == 1


def test_dapo_goes_on_in_rounds_until_the_batch_is_full_and_drops_the_surplus():
    outcomes = {"a": [RIGHT], "b": [MIXED], "c": [MIXED], "d": [MIXED], "e": [MIXED], "f": [WRONG]}
    dapo = DapoConfig(prompts_per_round=3, max_rounds=10)
    sampler, engine, ledger = sampler_for(outcomes, "abcdef", batch_size=3, dapo=dapo)
    step = sampler.sample_step()
    # Round 1: a filtered, b c kept. Round 2: d e kept, f filtered. Four kept, three wanted.
    assert engine.calls == [["a", "b", "c"], ["d", "e", "f"]]
    assert kept(step) == ["b", "c", "d"]
    assert finish(step, ledger) == {
        "step/num_trained_fresh": 3 * N,
        "step/num_surplus": N,
        "step/num_filtered_zero_variance": 2 * N,
    }


def test_dapo_trains_on_what_it_has_at_the_cap_and_says_so(caplog):
    outcomes = {"a": [MIXED], "b": [RIGHT], "c": [WRONG], "d": [RIGHT]}
    dapo = DapoConfig(prompts_per_round=2, max_rounds=2)
    sampler, engine, ledger = sampler_for(outcomes, "abcd", dapo=dapo)
    step = sampler.sample_step()
    assert kept(step) == ["a"]
    assert len(engine.calls) == 2
    assert "1 of 2 informative groups after the cap of 2 rounds" in caplog.text
    assert sum(finish(step, ledger).values()) == 4 * N


def test_dapo_ends_where_there_are_no_more_prompts_and_says_so(caplog):
    rounds = iter([[Prompt("a", "t", "")], []])
    sampler, engine, ledger = sampler_for({"a": [WRONG]}, "", dapo=DapoConfig(prompts_per_round=2))
    sampler._next_prompts = lambda count: next(rounds)
    step = sampler.sample_step()
    assert (step.kept, step.num_prompts, len(engine.calls)) == ([], 1, 1)
    assert "0 of 2 informative groups after 1 rounds, with no other prompt left" in caplog.text
    assert finish(step, ledger) == {"step/num_filtered_zero_variance": N}


def test_dapo_takes_three_batches_a_round_by_default():
    sampler, engine, _ = sampler_for({p: [MIXED] for p in "abcdef"}, "abcdef", dapo=DapoConfig())
    sampler.sample_step()
    assert [len(call) for call in engine.calls] == [6]


def test_dapo_filters_by_accuracy_and_not_by_the_shaped_reward():
    class Shaped(ScriptedEngine):
        def _answer(self, request):
            rollouts = tuple(Rollout(-0.1 * i, 0.0, 10, "text") for i in range(N))
            return RolloutGroup(request.group_id, request.prompt, rollouts, policy_version=0)

    ledger = RolloutLedger()
    sampler = GroupSampler(
        Shaped({}),
        lambda count: [Prompt("p", "t", "")] * count,
        ledger,
        group_size=N,
        batch_size=1,
        max_retries=0,
        dapo=DapoConfig(prompts_per_round=1, max_rounds=1),
    )
    assert sampler.sample_step().kept == []


def test_a_failed_request_is_retried_under_a_new_group_id_and_keeps_its_place():
    sampler, engine, ledger = sampler_for({"a": ["deadline", MIXED], "b": [MIXED]}, "ab")
    step = sampler.sample_step()
    assert kept(step) == ["a", "b"]
    assert engine.calls == [["a", "b"], ["a"]]
    assert len({group.group_id for group in step.kept}) == 2
    assert (step.num_retries, step.failed) == (1, [])
    # The three responses of the failed attempt were generated, so they are counted.
    assert finish(step, ledger) == {"step/num_trained_fresh": 2 * N, "step/num_failed_deadline": 3}


def test_a_request_that_keeps_failing_is_dropped_with_its_reason_and_the_step_goes_on():
    sampler, _, ledger = sampler_for({"a": ["engine_error"], "b": [MIXED]}, "ab", max_retries=2)
    step = sampler.sample_step()
    assert kept(step) == ["b"]
    assert [failure.reason for failure in step.failed] == ["engine_error"]
    assert finish(step, ledger) == {"step/num_trained_fresh": N, "step/num_failed_engine_error": 9}


def test_an_invalid_reward_is_not_retried():
    sampler, engine, ledger = sampler_for({"a": ["invalid_reward"], "b": [MIXED]}, "ab", max_retries=5)
    step = sampler.sample_step()
    assert len(engine.calls) == 1
    assert finish(step, ledger) == {"step/num_trained_fresh": N, "step/num_failed_invalid_reward": 3}


def test_c09_two_prompts_with_the_same_text_are_two_groups_with_their_own_labels():
    engine, ledger = ScriptedEngine({"a": [MIXED], "b": [MIXED]}), RolloutLedger()
    twins = iter([Prompt("a", "2+2=", "4"), Prompt("b", "2+2=", "5")])
    sampler = GroupSampler(
        engine,
        lambda count: [next(twins) for _ in range(count)],
        ledger,
        group_size=N,
        batch_size=2,
        max_retries=0,
    )
    groups = sampler.sample_step().kept
    assert [group.prompt.label for group in groups] == ["4", "5"]
    assert groups[0].group_id != groups[1].group_id


def test_an_engine_that_answers_with_too_few_rollouts_is_a_bug_and_not_trained():
    sampler, _, _ = sampler_for({"a": [[1, 0, 0]], "b": [MIXED]}, "ab")
    with pytest.raises(RuntimeError, match="4 rollouts.*3 rollouts"):
        sampler.sample_step()
