"""Requests to engines and back: order, deadlines, dying engines, unusable rewards. Engines are plain objects."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fake_engines import NEVER, Engine, SeededRay, good
from openrlhf.trainer.ppo_utils.experience import Experience
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from recorded import MAX_LENGTH, response, upstream_args

from openrlhf_ext.adapters import generation
from openrlhf_ext.adapters.engine import FAILURE_KEY
from openrlhf_ext.adapters.generation import EnginePool, GroupGenerator, unify_info
from openrlhf_ext.config import ExtConfig, RewardConfig, RolloutConfig
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.sampling import GroupSampler
from openrlhf_ext.types import FailedRequest, Prompt, RolloutGroup, RolloutRequest

pytestmark = pytest.mark.contract

N = 4


@pytest.fixture(autouse=True)
def seeded_ray(monkeypatch: pytest.MonkeyPatch) -> SeededRay:
    fake = SeededRay()
    monkeypatch.setattr(generation, "ray", fake)
    return fake


def generator_for(
    *engines: Engine, deadline_s=60.0, on_invalid="drop_group", log_probs=True, seed=None, sleeps=False, **more
):
    ext = ExtConfig(
        run_dir="unused",
        rollout=RolloutConfig(deadline_s=deadline_s, log_probs=log_probs, seed_requests=seed is not None),
        reward=RewardConfig(on_invalid=on_invalid),
    )
    args = upstream_args()
    args.train.seed = seed
    return GroupGenerator(EnginePool(engines, sleeps=sleeps), args, ext, temperature=0.5, **more)


def requests_for(count: int, num_rollouts: int = N) -> list[RolloutRequest]:
    return [RolloutRequest(f"g{i}", Prompt(f"p{i}", f"text {i}", label=str(i)), num_rollouts) for i in range(count)]


def one_result(
    responses: list[dict], problem: str | None = None, **settings
) -> RolloutGroup[Experience] | FailedRequest:
    """What the controller makes of one engine's answer to one request."""
    (result,) = generator_for(Engine(lambda call: (responses, problem)), **settings).generate(requests_for(1))
    return result


# -- order, load, progress --


@pytest.mark.parametrize("seed", range(5))
def test_results_are_in_request_order_whatever_the_order_of_completion(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(generation, "ray", SeededRay(seed))
    progress: list[tuple[int, int]] = []
    generator = generator_for(Engine(), Engine(), on_progress=lambda *done: progress.append(done))
    generator.policy_version = 7
    groups = generator.generate(requests_for(9))
    assert [group.group_id for group in groups] == [f"g{i}" for i in range(9)]
    assert [group.rewards() for group in groups] == [[float(i)] * N for i in range(9)]
    assert {group.policy_version for group in groups} == {7}
    assert progress == [(i, 9) for i in range(1, 10)]


def test_requests_go_to_the_engine_with_the_fewest_rollouts() -> None:
    # Rollouts 8, 2, 2, 2, 2, 4: the first engine takes the 8, the second all of the 2s (8), the first the 4.
    first, second = Engine(), Engine()
    requests = [r for i, n in enumerate((8, 2, 2, 2, 2, 4)) for r in requests_for(i + 1, n)[-1:]]
    generator_for(first, second).generate(requests)
    assert [call["prompt"] for call in first.calls] == ["text 0", "text 5"]
    assert [call["prompt"] for call in second.calls] == ["text 1", "text 2", "text 3", "text 4"]


def test_an_engine_gets_the_prompt_its_label_and_the_sampling_settings() -> None:
    engine = Engine()
    generator_for(engine, deadline_s=60.0).generate(requests_for(1))
    assert engine.calls == [
        {
            "prompt": "text 0",
            "label": "0",
            "images": None,
            "sampling": {
                "temperature": 0.5,
                "top_p": 1.0,
                "max_tokens": 16,
                "min_tokens": 0,
                "skip_special_tokens": False,
                "logprobs": 1,
            },
            "max_length": MAX_LENGTH,
            "num_rollouts": N,
            "deadline_s": 60.0,
            "seed": None,
        }
    ]


def test_a_seeded_request_draws_the_same_whatever_came_before_and_never_as_another() -> None:
    def seeds(versions: list[int], stream: str = "train", seed: int = 1) -> list[int]:
        engine = Engine()
        generator = generator_for(engine, stream=stream, seed=seed)
        for version in versions:
            generator.policy_version = version
            generator.generate(requests_for(2))
        return [call["seed"] for call in engine.calls]

    first = seeds([0, 0, 1])
    assert first == seeds([0, 0, 1])
    assert seeds([1]) == first[4:], "the seeds of a version do not depend on the requests of earlier ones"
    every = [*first, *seeds([0], stream="eval"), *seeds([0], seed=2)]
    # A group takes as many numbers as it has rollouts.
    assert len({seed + i for seed in every for i in range(N)}) == len(every) * N


def test_no_request_reaches_no_engine() -> None:
    engine = Engine()
    assert generator_for(engine, sleeps=True).generate([]) == []
    assert engine.events == []


def test_engines_are_awake_for_a_batch_of_requests_only_even_when_it_fails() -> None:
    engine = Engine()
    generator_for(engine, sleeps=True).generate(requests_for(2))
    assert engine.events == ["wake_up", "generate", "generate", "sleep"]
    broken = Engine(lambda call: TypeError("not an error of Ray"))
    with pytest.raises(TypeError):
        generator_for(broken, sleeps=True).generate(requests_for(1))
    assert broken.events == ["wake_up", "generate", "sleep"]


# -- deadlines and errors --


def test_an_answer_that_never_comes_is_a_failed_request_and_the_others_are_unaffected(
    seeded_ray: SeededRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_GRACE_S", 0.05)
    engine = Engine(lambda call: NEVER if call["label"] == "1" else good(call))
    results = generator_for(engine, deadline_s=0.01).generate(requests_for(3))
    assert isinstance(results[0], RolloutGroup) and isinstance(results[2], RolloutGroup)
    assert isinstance(results[1], FailedRequest)
    assert (results[1].reason, results[1].num_generated, results[1].retryable) == ("deadline", 0, True)
    assert [ref.outcome for ref in seeded_ray.cancelled] == [NEVER]


def test_responses_that_finished_before_the_deadline_are_counted() -> None:
    result = one_result([response(response_tokens=2), response(response_tokens=5)], "deadline")
    assert isinstance(result, FailedRequest)
    assert (result.reason, result.num_generated, result.num_tokens) == ("deadline", 2, 2 + 5)
    assert result.detail == "2 of 4 rollouts unfinished after 60 s" and result.retryable


@pytest.mark.parametrize("outcome", [([response()], "ValueError: boom"), RayTaskError("f", "tb", ValueError("boom"))])
def test_an_error_in_the_engine_is_a_failed_request_with_its_message(outcome: object) -> None:
    (result,) = generator_for(Engine(lambda call: outcome)).generate(requests_for(1))
    assert isinstance(result, FailedRequest)
    assert (result.reason, result.retryable) == ("engine_error", True) and "boom" in result.detail


@pytest.mark.parametrize("death", [RayActorError(), OutOfMemoryError("1 worker(s) were killed")])
def test_a_dead_engine_is_left_out_and_its_requests_are_generated_by_the_other(death: Exception) -> None:
    dead, alive = Engine(lambda call: death), Engine()
    generator, ledger = generator_for(dead, alive), RolloutLedger()
    prompts = iter(request.prompt for request in requests_for(6))
    sampler = GroupSampler(
        generator,
        lambda count: [next(prompts) for _ in range(count)],
        ledger,
        group_size=N,
        batch_size=6,
        max_retries=1,
    )
    step = sampler.sample_step()
    assert [group.prompt.prompt_id for group in step.kept] == [f"p{i}" for i in range(6)]
    assert (len(dead.calls), len(alive.calls), step.num_retries, step.failed) == (3, 6, 3, [])
    ledger.assign("trained_fresh", 6 * N)
    assert ledger.close_step()["step/rollouts_generated"] == 6 * N


@pytest.mark.parametrize("death", [RayActorError(), OutOfMemoryError("1 worker(s) were killed")])
def test_the_run_stops_when_the_last_engine_dies(death: Exception) -> None:
    engines = [Engine(lambda call: death) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no vLLM engine is left"):
        generator_for(*engines).generate(requests_for(4))


# -- rewards --


def test_the_reward_trained_on_is_the_float32_value_and_accuracy_is_the_score() -> None:
    group = one_result([response(reward=0.1, scores=1.0, extra_logs={"format": 0.5})] * N)
    assert isinstance(group, RolloutGroup)
    assert group.rewards() == [torch.tensor(0.1).item()] * N and group.accuracies() == [1.0] * N
    payload = group.rollouts[0].payload
    assert payload.rewards.tolist() == group.rewards()[:1] and payload.info["format"].tolist() == [0.5]
    assert group.rollouts[0].num_tokens == 3 == int(payload.action_mask.sum())


@pytest.mark.parametrize("kind", ["deadline", "died"])
def test_a_verifier_that_hangs_or_crashes_on_an_answer_scores_it_zero_and_is_counted(kind: str) -> None:
    bad = response(reward=None, extra_logs={FAILURE_KEY: (kind, "killed after 10 s")})
    generator = generator_for(Engine(lambda call: ([bad, response(), response(), response()], None)))
    (group,) = generator.generate(requests_for(1))
    assert group.rewards() == [0.0, 1.0, 1.0, 1.0] and group.accuracies() == [0.0, 1.0, 1.0, 1.0]
    assert generator.take_metrics()["step/num_reward_timeouts"] == 1
    assert generator.take_metrics()["step/num_reward_timeouts"] == 0
    assert FAILURE_KEY not in group.rollouts[0].payload.info


UNUSABLE = {
    "none": {"reward": None},
    "nan": {"reward": math.nan},
    "infinite": {"reward": math.inf},
    "text": {"reward": "correct"},
    "score": {"reward": 1.0, "scores": math.nan},
    "exception": {"reward": None, "extra_logs": {FAILURE_KEY: ("exception", "ZeroDivisionError")}},
    "invalid": {"reward": None, "extra_logs": {FAILURE_KEY: ("invalid", "a list")}},
}


@pytest.mark.parametrize("fields", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_reward_refuses_the_whole_group_and_is_not_retried(fields: dict) -> None:
    result = one_result([response(), response(**fields), response(), response()])
    assert isinstance(result, FailedRequest)
    assert (result.reason, result.num_generated, result.num_tokens) == ("invalid_reward", 4, 4 * 3)
    assert not result.retryable and result.detail


@pytest.mark.parametrize("fields", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_reward_is_zero_where_the_user_says_so(fields: dict) -> None:
    group = one_result([response(), response(**fields), response(), response()], on_invalid="zero")
    assert isinstance(group, RolloutGroup)
    assert group.rewards() == [1.0, 0.0, 1.0, 1.0] and group.accuracies() == [1.0, 0.0, 1.0, 1.0]


# -- responses that upstream keeps: open cases C14, C15, C29 --


def test_one_empty_response_refuses_its_group_and_leaves_the_others_whole() -> None:
    # C15: n = 4, one response without a token and with reward 1, three with rewards 0, 1, 0.
    rewards = {"1": [(1.0, 0), (0.0, 3), (1.0, 3), (0.0, 3)]}
    engine = Engine(
        lambda call: (
            [response(reward=r, response_tokens=t) for r, t in rewards.get(call["label"], [(0.5, 3)] * N)],
            None,
        )
    )
    results = generator_for(engine).generate(requests_for(4))
    assert [type(result) for result in results] == [RolloutGroup, FailedRequest, RolloutGroup, RolloutGroup]
    assert [len(result.rollouts) for result in results if isinstance(result, RolloutGroup)] == [N] * 3
    refused = results[1]
    assert (refused.reason, refused.num_generated, refused.num_tokens) == ("empty_response", 4, 9)
    assert not refused.retryable


def test_a_response_that_starts_behind_the_context_window_is_empty() -> None:
    # C29: n = 2, rewards 100 and 1, no trainable token in the first; upstream would shift the other's baseline by it.
    behind = response(reward=100.0, prompt_tokens=MAX_LENGTH, response_tokens=2)
    result = one_result([behind, response(reward=1.0)])
    assert isinstance(result, FailedRequest) and result.reason == "empty_response"
    assert result.detail == f"no response token fits into --data.max_len {MAX_LENGTH}"


def with_log_probs(change: Callable[[list[float]], list[float] | None]) -> dict:
    one = response()
    return one | {"rollout_log_probs": change(one["rollout_log_probs"])}


@pytest.mark.parametrize(
    "change",
    [lambda x: None, lambda x: x[:-1], lambda x: [*x[:-1], math.nan], lambda x: [*x[:-1], -math.inf]],
    ids=["missing", "short", "nan", "infinite"],
)
def test_unusable_log_probabilities_are_an_engine_error_unless_nobody_asked_for_them(change: Callable) -> None:
    result = one_result([response(), with_log_probs(change)])
    assert isinstance(result, FailedRequest)
    assert (result.reason, result.num_generated, result.retryable) == ("engine_error", 2, True)
    assert isinstance(one_result([with_log_probs(lambda x: None)], log_probs=False), RolloutGroup)


# -- uniform info: open case C18 --


def test_unified_info_has_the_same_keys_in_the_same_order_and_zero_where_there_was_none() -> None:
    rows = [
        Experience(info={key: torch.tensor([1.0]) for key in ("reward", "d", "b")}),
        Experience(info={"extra": torch.tensor([2]), "c": torch.tensor([True]), "reward": torch.tensor([0.5])}),
    ]
    unify_info(rows)
    assert [list(row.info) for row in rows] == [["b", "c", "d", "extra", "reward"]] * 2
    values = [[value.item() for value in row.info.values()] for row in rows]
    assert values == [[1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 2.0, 0.5]]
    assert {value.dtype for row in rows for value in row.info.values()} == {torch.float32}
