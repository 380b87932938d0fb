"""Agent files of OpenRLHF (``--train.agent_func_path``): several turns in one rollout, from the engine to the loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engines import NEVER, Engine, SeededRay
from fakes import policy_actor
from openrlhf.trainer.ray.vllm_engine import _load_agent_executor
from openrlhf.utils.agent import MultiTurnAgentExecutor
from recorded import MAX_LENGTH, mixed_rewards, recorded_samples, train, upstream_args
from replayed import SMALL, ComposedRun, birth, group_of
from test_generation import generator_for, one_result, requests_for
from vllm import SamplingParams

from openrlhf_ext.adapters import engine, generation
from openrlhf_ext.adapters.engine import AgentFailure, EngineActor, Turns, check_agent_file
from openrlhf_ext.adapters.replayed_rows import restore_samples
from openrlhf_ext.adapters.step_report import report_failures, sample_lines
from openrlhf_ext.config import FillConfig, GroupsConfig, ReplayConfig, RewardConfig
from openrlhf_ext.tasks.tiny_model import make_tokenizer
from openrlhf_ext.types import FailedRequest, RolloutGroup

pytestmark = pytest.mark.contract

AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Guess(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        is_done = self.turn == 2
        return {
            "rewards": torch.tensor(1.0 if states["label"] in states["action_text"] else 0.25),
            "scores": torch.tensor(0.5),
            "environment_feedback": "!" if is_done else "no:",
            "done": is_done,
            "extra_logs": {"turns": torch.tensor(self.turn)},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Guess)
"""
TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def engine_with(executor, answers=("3", "4"), file: str = "agent.py") -> EngineActor:
    """The engine actor without vLLM: a rollout's turns are ``answers``, each ended by EOS.

    The log-probability of the n-th token that it is asked for is -n / 10; ``calls`` keeps the prompts and the seeds.
    """
    actor = object.__new__(EngineActor)
    actor.executor, actor._agent_file, actor._tokenizer, actor.calls = executor, file, TOKENIZER, []
    count = 0

    async def generate(prompt_token_ids, sampling_params, multi_modal_data=None):
        nonlocal count
        text = answers[len(actor.calls) % len(answers)]
        actor.calls.append((list(prompt_token_ids), sampling_params.seed))
        if isinstance(text, Exception):
            raise text
        tokens, log_probs = [*ids(text), EOS], []
        for token in tokens:
            count += 1
            log_probs.append({token: SimpleNamespace(logprob=-count / 10)})
        output = SimpleNamespace(token_ids=tokens, text=text, finish_reason="stop", logprobs=log_probs)
        return SimpleNamespace(outputs=[output])

    actor.generate = generate
    return actor


def answer(actor: EngineActor, num_rollouts: int = 1, seed: int | None = None, max_length: int = 24) -> tuple:
    call = actor.generate_group(
        prompt="2=",
        label="4",
        images=None,
        sampling={"max_tokens": 8, "logprobs": 1},
        max_length=max_length,
        num_rollouts=num_rollouts,
        deadline_s=60.0,
        seed=seed,
    )
    return asyncio.run(call)


@pytest.fixture
def agent(tmp_path: Path) -> MultiTurnAgentExecutor:
    return load(tmp_path, AGENT)


def load(folder: Path, text: str):
    (folder / "agent.py").write_text(text)
    return _load_agent_executor(str(folder / "agent.py"))


@pytest.fixture(autouse=True)
def seeded_ray(monkeypatch: pytest.MonkeyPatch) -> SeededRay:
    fake = SeededRay()
    monkeypatch.setattr(generation, "ray", fake)
    return fake


# -- from the agent to a rollout --


def test_a_rollout_of_two_turns_is_what_the_agent_and_the_engine_said(agent: MultiTurnAgentExecutor) -> None:
    actor = engine_with(agent)
    responses, problem = answer(actor)
    assert problem is None
    tokens = [*ids("2="), *ids("3"), EOS, *ids("no:"), *ids("4"), EOS, *ids("!")]
    assert [prompt for prompt, _ in actor.calls] == [ids("2="), tokens[:7]]
    group = one_result(responses)
    assert isinstance(group, RolloutGroup)
    (rollout,) = group.rollouts
    # 0.25 for the wrong first answer and 1 for the second; the accuracy is the last turn's score.
    assert (rollout.reward, rollout.accuracy, rollout.num_tokens) == (1.25, 0.5, 4)
    row = rollout.payload
    assert row.sequences[0].tolist() == tokens
    # Entry t is for token t + 1: 1 prompt token, 2 sampled, 3 of feedback, 2 sampled, 1 of feedback.
    assert row.action_mask[0].tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 0]
    assert row.rollout_log_probs[0].tolist() == pytest.approx([0, -0.1, -0.2, 0, 0, 0, -0.3, -0.4, 0])
    assert row.response_length.tolist() == [7] and row.info["turns"].tolist() == [2]


def test_feedback_beyond_the_context_is_cut_and_ends_the_rollout(tmp_path: Path) -> None:
    # 2 + 2 + 26 = 30 tokens and a context of 24: no second turn, and no token of the policy is lost.
    executor = load(tmp_path, AGENT.replace('"no:"', '"abcdefghijklmnopqrstuvwxyz"'))
    group = one_result(answer(engine_with(executor))[0])
    assert isinstance(group, RolloutGroup)
    (rollout,) = group.rollouts
    assert (rollout.reward, rollout.num_tokens) == (0.25, 2)
    assert rollout.payload.action_mask[0].tolist() == [0, 1, 1] + [0] * 20 and MAX_LENGTH == 24


def test_what_a_buffer_keeps_of_several_turns_is_what_was_sampled(local_ray: None) -> None:
    args = upstream_args()
    samples = recorded_samples(mixed_rewards(1), feedback=(3, 1))
    group = group_of(samples)
    stored, rows = birth(args, group, engine_gap=True)
    for old, new, row, kept in zip(
        samples, restore_samples(stored, log_probs=True), rows, stored.rollouts, strict=True
    ):
        for name in ("sequences", "attention_mask", "action_mask", "response_length", "total_length", "rewards"):
            assert torch.equal(getattr(new, name), getattr(old, name)), name
        mask = old.action_mask[0].bool()
        assert 0 < int(mask.sum()) < int(old.response_length) or int(mask.sum()) == 1
        assert torch.equal(new.rollout_log_probs[0][mask], row.action_log_probs[mask])
        assert not new.rollout_log_probs[0][~mask].any()
        assert torch.equal(torch.from_numpy(kept.payload.behavior_log_probs), row.action_log_probs[mask])


def test_tokens_of_the_environment_are_never_trained_whatever_the_origin(local_ray: None, tmp_path: Path) -> None:
    # The policy is a table of next tokens, and 8, 9 and 10 are said by the environment only, in this order.
    args = upstream_args("group_norm", *SMALL)
    run = ComposedRun(
        args, tmp_path, groups=GroupsConfig(), fill=FillConfig(capacity=8), replay=ReplayConfig(warmup_steps=0)
    )
    rows = []
    for patterns in ("MMMM", "MMWR"):
        groups = run.groups(patterns, feedback=(8, 9, 10))
        for group in groups:
            for rollout in group.rollouts:
                row = rollout.payload
                first = int(row.action_mask[0].argmax()) + 1
                own = torch.cat([torch.zeros(1, 1), row.action_mask], 1).bool()
                own[:, :first] = True
                row.sequences = torch.where(own & (row.sequences >= 8), row.sequences - 3, row.sequences)
        rows = run.step(groups).rows
    assert {int(row.info["origin"]) for row in rows} == {0, 1, 2}
    for origin in range(3):
        own = [row for row in rows if int(row.info["origin"]) == origin]
        assert all((row.sequences == 9).sum() == 1 for row in own)
        actor = policy_actor(args)
        train(actor, own, args)
        gradient = actor._engine.gradients[-1]
        assert not gradient[8].any() and not gradient[9].any()
        assert gradient[10].any()  # what follows the environment's words is the policy's


# -- turns have random numbers of their own --


def test_no_two_turns_of_a_request_are_drawn_with_the_same_seed(agent: MultiTurnAgentExecutor) -> None:
    actor = engine_with(agent)
    answer(actor, num_rollouts=3, seed=65_536)
    seeds = [seed for _, seed in actor.calls]
    assert sorted(seeds)[:3] == [65_536, 65_537, 65_538] and len(set(seeds)) == 6
    assert all(SamplingParams(seed=seed).seed == seed < 2**63 for seed in seeds)


def test_the_engines_own_stream_needs_no_seeds(agent: MultiTurnAgentExecutor) -> None:
    actor = engine_with(agent)
    answer(actor, num_rollouts=2)
    assert [seed for _, seed in actor.calls] == [None] * 4


def test_sampling_parameters_that_an_agent_keeps_for_itself_are_not_written_into() -> None:
    actor, kept = engine_with(None), SamplingParams(temperature=0.5)
    turns = Turns(actor, 7)
    for _ in range(2):
        asyncio.run(turns.generate([1], kept))
    assert kept.seed is None and len({seed for _, seed in actor.calls} - {None}) == 2


# -- what goes wrong --


def failing(text: str) -> str:
    return AGENT.replace("        self.turn += 1\n", f"        self.turn += 1\n        {text}\n")


def test_an_exception_of_the_agent_names_its_file_and_line_and_is_retried(tmp_path: Path) -> None:
    executor = load(tmp_path, failing("raise KeyError('board')"))
    responses, problem = answer(engine_with(executor, file="my/agent.py"), num_rollouts=2)
    assert isinstance(problem, AgentFailure) and responses == []
    assert problem == "my/agent.py raised KeyError: 'board' (agent.py:11)"
    result = one_result(responses, problem)
    assert isinstance(result, FailedRequest)
    assert (result.reason, result.retryable, result.detail) == ("invalid_reward", True, str(problem))
    with pytest.raises(RuntimeError, match="my/agent.py raised KeyError: 'board' .* works on no prompt"):
        report_failures([result], 1, "step 1")


def test_an_engine_that_fails_in_a_turn_is_not_the_agents_fault(agent: MultiTurnAgentExecutor) -> None:
    responses, problem = answer(engine_with(agent, ("3", RuntimeError("out of memory"))))
    assert (responses, problem) == ([], "RuntimeError: out of memory") and not isinstance(problem, AgentFailure)
    result = one_result(responses, problem)
    assert isinstance(result, FailedRequest) and (result.reason, result.retryable) == ("engine_error", True)


def test_an_agent_that_lives_with_a_failure_of_the_engine_is_not_blamed_for_it(tmp_path: Path) -> None:
    generate = "        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]\n"
    again = f"        try:\n    {generate}        except RuntimeError:\n    {generate}"
    actor = engine_with(load(tmp_path, CUSTOM.replace(generate, again)), (RuntimeError("busy"), "3", KeyError("x")))
    responses, problem = answer(actor, num_rollouts=2)
    # The first rollout fails, tries again and is done; the second fails with what it does not expect.
    assert (len(responses), problem) == (1, "KeyError: 'x'")


def test_an_agent_that_gives_no_number_as_reward_has_an_unusable_reward(tmp_path: Path) -> None:
    responses, problem = answer(engine_with(load(tmp_path, AGENT.replace("1.0 if", "float('nan') if"))))
    assert problem is None
    result = one_result(responses)
    assert isinstance(result, FailedRequest) and result.reason == "invalid_reward"


CUSTOM = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    reward_func = len  # not that of a reward file

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(prompt)["input_ids"]
        output = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        return {
            "prompt": prompt, "label": label, "reward": 1.0, "rollout_log_probs": None,
            "observation_tokens": tokens + output.token_ids,
            "action_ranges": [(len(tokens), len(tokens) + len(output.token_ids))],
        }
"""


def test_an_executor_of_ones_own_may_leave_out_what_upstream_lets_it_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = engine_with(load(tmp_path, CUSTOM))
    actor.kwargs = {"model": "folder"}
    monkeypatch.setattr(engine, "get_tokenizer", lambda *what, **more: TOKENIZER)
    args = SimpleNamespace(data=SimpleNamespace(disable_fast_tokenizer=False))
    actor.configure(SimpleNamespace(args=args), RewardConfig())
    group = one_result(answer(actor)[0], log_probs=False)
    assert isinstance(group, RolloutGroup) and (group.rewards(), group.accuracies()) == ([1.0], [1.0])


def test_a_response_without_what_training_needs_is_named(tmp_path: Path) -> None:
    executor = load(tmp_path, CUSTOM.replace('"action_ranges"', '"ranges"'))
    responses, problem = answer(engine_with(executor))
    assert responses == [] and isinstance(problem, AgentFailure)
    assert problem == "the response of AgentExecutor in agent.py has no 'action_ranges'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (agent.py:1)"),
        ("x = 1", "Agent module must contain AgentExecutor class"),
        ("class AgentExecutor: pass", "AgentExecutor must inherit from AgentExecutorBase"),
        (AGENT.replace("def __init__(self):\n        super", "def __init__(self, size):\n        super"), "size"),
        ("raise SystemExit(3)", "SystemExit: 3 (agent.py:1)"),
    ],
    ids=["import", "no class", "other class", "arguments", "exit"],
)
def test_an_agent_file_that_engines_could_not_use_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "agent.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        check_agent_file(str(tmp_path / "agent.py"))
    message = str(caught.value)
    assert message.startswith(f"--train.agent_func_path {tmp_path / 'agent.py'} cannot be used: ")
    assert problem in message and "It must be a Python file that defines AgentExecutor" in message


def test_a_good_agent_file_passes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    check_agent_file(str(tmp_path / "agent.py"))


def test_an_engine_that_an_agent_blocks_is_left_out_and_the_run_ends_with_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generation, "_GRACE_S", 0.05)
    blocked, healthy = Engine(lambda call: NEVER, health=NEVER), Engine()
    generator = generator_for(blocked, healthy, deadline_s=0.01)
    results = generator.generate(requests_for(2))
    assert [type(result) for result in results] == [FailedRequest, RolloutGroup]
    assert "vLLM engine 0 of 2 does not answer and is left out (1 remain)" in caplog.text
    assert all(isinstance(result, RolloutGroup) for result in generator.generate(requests_for(2)))
    assert len(healthy.calls) == 3
    with pytest.raises(RuntimeError, match="the last one, does not answer any more; most often an agent file blocks"):
        generator_for(Engine(lambda call: NEVER, health=NEVER), deadline_s=0.01).generate(requests_for(1))


def test_a_late_answer_of_a_healthy_engine_costs_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_GRACE_S", 0.05)
    slow = Engine(lambda call: NEVER)
    generator = generator_for(slow, deadline_s=0.01)
    for _ in range(2):
        assert isinstance(generator.generate(requests_for(1))[0], FailedRequest)
    assert len(slow.calls) == 2


def test_samples_are_shown_with_what_was_said_between_the_turns(agent: MultiTurnAgentExecutor) -> None:
    group = one_result(answer(engine_with(agent))[0])
    assert isinstance(group, RolloutGroup)
    row = group.rollouts[0].payload
    single = SimpleNamespace(sequences=row.sequences[0], action_mask=row.action_mask[0], advantages=torch.ones(9))
    (line,) = sample_lines(1, [group], [single], TOKENIZER, limit=5)
    assert (line["response"], line["advantage"]) == ("3no:4", 1.0)
