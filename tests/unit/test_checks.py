"""Every contradiction in the settings is one message that names the flags and the way out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_ext.checks import check, check_reward_file, read_prompt_files
from openrlhf_ext.config import (
    ConfigError,
    DapoConfig,
    DataConfig,
    EvalConfig,
    ExtConfig,
    FillConfig,
    GroupsConfig,
    MoppsConfig,
    PilotConfig,
    PoolConfig,
    ReplayConfig,
    SuccessReplayConfig,
    ThrottleConfig,
)
from openrlhf_ext.settings import Settings

GOOD: dict[str, object] = {
    "actor.model_name_or_path": "organization/model",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 2,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 8,
    "critic.model_name_or_path": None,
    "reward.model_name_or_path": None,
    "reward.remote_url": "http://localhost:5000/reward",
    "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1.0,
    "reward.stop_properly_penalty_coef": None,
    "train.agent_func_path": None,
    "train.async_enable": False,
    "train.colocate_all": False,
    "train.colocate_actor_ref": False,
    "train.colocate_critic_reward": False,
    "train.batch_size": 64,
    "train.micro_batch_size": 8,
    "train.num_episodes": 1,
    "train.max_epochs": 1,
    "train.dynamic_batch_enable": False,
    "rollout.batch_size": 16,
    "rollout.n_samples_per_prompt": 8,
    "rollout.micro_batch_size": 4,
    "rollout.max_new_tokens": 32,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "data.prompt_dataset": "organization/data",
    "data.prompt_probs": None,
    "data.max_samples": 1000,
    "data.max_len": 64,
    "data.input_key": "input",
    "data.label_key": None,
    "data.image_key": "images",
    "data.max_images_per_prompt": 0,
    "data.input_template": None,
    "data.apply_chat_template": False,
    "eval.dataset": None,
    "eval.n_samples_per_prompt": 8,
    "eval.steps": -1,
    "eval.temperature": 0.6,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0.0,
    "algo.dynamic_filtering_enable": False,
    "ds.ring_attn_size": 1,
    "ds.use_liger_kernel": False,
    "ds.tensor_parallel_size": 1,
    "ds.zero_stage": 2,
    "ds.attn_implementation": "flash_attention_2",
    "ds.load_in_4bit": False,
    "ds.lora.rank": 0,
    "ds.lora.alpha": 16,
    "ds.lora.dropout": 0,
    "ckpt.load_enable": False,
    "ckpt.disable_ds": False,
    "ckpt.save_steps": -1,
    "train.enable_ema": False,
    "ckpt.max_num": 3,
    "use_ms": False,
}


def nest(flat: dict[str, object]) -> SimpleNamespace:
    root = SimpleNamespace()
    for key, value in flat.items():
        *parents, name = key.split(".")
        node = root
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, SimpleNamespace())
            node = getattr(node, parent)
        setattr(node, name, value)
    return root


def settings(tmp_path: Path, flat: dict[str, object], **ext: object) -> Settings:
    merged = {**GOOD, **flat}
    return Settings(nest(merged), ExtConfig(**{"run_dir": str(tmp_path / "run"), **ext}), merged, {})


def refusal(tmp_path: Path, flat: dict[str, object], **ext: object) -> str:
    with pytest.raises(ValueError) as caught:
        check(settings(tmp_path, flat, **ext))
    return str(caught.value)


def test_good_settings_pass(tmp_path: Path) -> None:
    check(settings(tmp_path, {}))
    # What is not used may have any size, and so may what has GPUs of its own.
    check(settings(tmp_path, {"train.colocate_all": True, "vllm.num_engines": 2, "ref.num_nodes": 0}))
    check(settings(tmp_path, {"train.colocate_actor_ref": True, "vllm.tensor_parallel_size": 4}))
    check(settings(tmp_path, {"algo.kl.init_coef": 0.1, "algo.advantage.estimator": "gae"}))
    small = {"critic.num_gpus_per_node": 1, "algo.advantage.estimator": "gae", "vllm.num_engines": 2}
    check(settings(tmp_path, {"train.colocate_all": True, **small}))
    check(settings(tmp_path, {}, dapo=DapoConfig()))
    check(settings(tmp_path, {"rollout.max_new_tokens": None, "eval.dataset": "organization/data"}))


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"actor.model_name_or_path": None}, "--actor.model_name_or_path is missing; "),
        ({"data.prompt_dataset": None}, "--data.prompt_dataset is missing; "),
        ({"vllm.num_engines": None}, "--vllm.num_engines must be at least 1, got None; "),
        ({"vllm.num_engines": 0}, "--vllm.num_engines must be at least 1, got 0; "),
        ({"reward.remote_url": None}, "nothing gives rewards: rewards are verified "),
        ({"train.async_enable": True}, "--train.async_enable is not supported: "),
        ({"use_ms": True}, "--use_ms is not supported; "),
        ({"data.max_images_per_prompt": -1}, "--data.max_images_per_prompt must be at least 0, which is none, got -1"),
        (
            {"data.max_images_per_prompt": 1, "train.dynamic_batch_enable": True},
            "--train.dynamic_batch_enable makes OpenRLHF pack rows end to end, which takes images from their places, "
            "so it does not go with --data.max_images_per_prompt 1; remove it",
        ),
        ({"data.max_images_per_prompt": 1, "ds.ring_attn_size": 2}, "--ds.ring_attn_size 2 makes OpenRLHF pack rows"),
        ({"data.max_images_per_prompt": 1, "ds.use_liger_kernel": True}, "--ds.use_liger_kernel has no vision models"),
        ({"rollout.batch_size": 0}, "--rollout.batch_size must be at least 1, got 0"),
        ({"train.batch_size": -1}, "--train.batch_size must be at least 1, got -1"),
        ({"rollout.n_samples_per_prompt": 0}, "--rollout.n_samples_per_prompt must be at least 1, got 0"),
        ({"eval.n_samples_per_prompt": 0}, "--eval.n_samples_per_prompt must be at least 1, got 0"),
        ({"data.max_samples": 0}, "--data.max_samples must be at least 1, got 0"),
        ({"ckpt.max_num": 0}, "--ckpt.max_num must be at least 1, got 0"),
        ({"rollout.temperature": 0.0}, "--rollout.temperature must be above 0: logits are divided, got 0; "),
        ({"rollout.temperature": float("nan")}, "--rollout.temperature must be above 0: logits are divided, got nan;"),
        ({"eval.temperature": -0.1}, "--eval.temperature must be at least 0, which is greedy, got -0.1; "),
        ({"rollout.top_p": 0.0}, "--rollout.top_p must be above 0 and at most 1, got 0; "),
        ({"rollout.top_p": 1.1}, "--rollout.top_p must be above 0 and at most 1, got 1.1; "),
        ({"eval.steps": 0}, "--eval.steps must be at least 1, or -1 for never, got 0"),
        ({"ckpt.save_steps": -2}, "--ckpt.save_steps must be at least 1, or -1 for never, got -2"),
        (
            {"reward.overlong_buffer_len": 33.0},
            "--reward.overlong_buffer_len 33 must be above 0 and at most --rollout",
        ),
        (
            {"reward.overlong_buffer_len": 8.0, "rollout.max_new_tokens": None},
            "--reward.overlong_buffer_len 8 must be above 0 and at most --rollout.max_new_tokens, which is None; ",
        ),
        (
            {"reward.overlong_buffer_len": 8.0, "reward.overlong_penalty_factor": -1.0},
            "--reward.overlong_penalty_factor must be above 0, or long answers gain, got -1",
        ),
        ({"reward.stop_properly_penalty_coef": 1.5}, "--reward.stop_properly_penalty_coef must be a factor up to 1, "),
        # The actor has 1 node with 2 GPUs, there is one engine.
        (
            {"vllm.tensor_parallel_size": 0},
            "--vllm.num_engines 1 --vllm.tensor_parallel_size 0: both must be at least",
        ),
        ({"algo.kl.init_coef": 0.1, "ref.num_nodes": 0}, "--ref.num_nodes 0 --ref.num_gpus_per_node 8: both must be"),
        (
            {"train.colocate_all": True},
            "--vllm.num_engines 1 --vllm.tensor_parallel_size 1 with --train.colocate_all, which puts them on the "
            "GPUs of --actor.num_nodes 1 --actor.num_gpus_per_node 2: 1 GPUs for engines, 2 for the actor; make "
            "them the same number, with --vllm.num_engines 2 for example",
        ),
        (
            {
                "train.colocate_all": True,
                "actor.num_nodes": 2,
                "actor.num_gpus_per_node": 2,
                "vllm.tensor_parallel_size": 4,
            },
            "--vllm.num_engines 1 --vllm.tensor_parallel_size 4 with --train.colocate_all, which puts them on the "
            "GPUs of --actor.num_nodes 2 --actor.num_gpus_per_node 2: an engine would be on two nodes; use a "
            "--vllm.tensor_parallel_size that divides 2",
        ),
        (
            {"train.colocate_actor_ref": True, "algo.kl.init_coef": 0.1},
            "--ref.num_nodes 1 --ref.num_gpus_per_node 8 with --train.colocate_actor_ref, which puts them on the GPUs "
            "of --actor.num_nodes 1 --actor.num_gpus_per_node 2: give both the same, --ref.num_nodes 1 "
            "--ref.num_gpus_per_node 2",
        ),
        (
            {"train.colocate_all": True, "vllm.num_engines": 2, "algo.advantage.estimator": "gae"},
            "--critic.num_nodes 1 --critic.num_gpus_per_node 8 with --train.colocate_all, which puts them on the GPUs "
            "of --actor.num_nodes 1 --actor.num_gpus_per_node 2: give both the same, --critic.num_nodes 1 "
            "--critic.num_gpus_per_node 2",
        ),
        # 2 ranks, and one copy of the model takes 4.
        ({"ds.ring_attn_size": 4}, "--actor.num_nodes x --actor.num_gpus_per_node = 2 is not a multiple of"),
        # data.max_len is 64: 64 new tokens would leave none for the prompt.
        ({"rollout.max_new_tokens": 64}, "--rollout.max_new_tokens must be in [1, 63] so that there is room"),
        ({"reward.remote_url": "/no/reward.py"}, "--reward.remote_url: there is no file /no/reward.py; "),
        ({"train.agent_func_path": "/no/agent.py"}, "--train.agent_func_path: there is no file /no/agent.py; "),
        (
            {"train.agent_func_path": "agent"},
            "--train.agent_func_path agent must be a .py file that defines AgentExec",
        ),
        ({"ds.load_in_4bit": True}, "--ds.load_in_4bit is not supported: vLLM engines take whole weights only; "),
        ({"ds.lora.rank": -1}, "--ds.lora.rank must be at least 0, which is off, got -1"),
        ({"ds.lora.rank": 8, "ds.lora.alpha": 0}, "--ds.lora.alpha must be above 0, or nothing is trained, got 0"),
        ({"ds.lora.rank": 8, "ds.lora.dropout": 1.0}, "--ds.lora.dropout must be at least 0 and below 1, got 1"),
        ({"ds.lora.rank": 8, "ds.zero_stage": 3}, "--ds.lora.rank 8 does not go with --ds.zero_stage 3: "),
        ({"ds.lora.rank": 8, "train.enable_ema": True}, "--ds.lora.rank 8 does not go with --train.enable_ema: "),
        (
            {"ds.lora.rank": 8, "ds.tensor_parallel_size": 2},
            "--ds.lora.rank 8 does not go with --ds.tensor_parallel_size 2: ",
        ),
        ({"data.prompt_dataset": "/no/a.jsonl"}, "--data.prompt_dataset: there is no file or folder /no/a.jsonl; "),
        ({"eval.dataset": "/no/a.jsonl"}, "--eval.dataset: there is no file or folder /no/a.jsonl; "),
        ({"actor.model_name_or_path": "/no/m"}, "--actor.model_name_or_path: there is no folder /no/m; "),
        ({"actor.model_name_or_path": "no/such/m"}, "--actor.model_name_or_path: there is no folder no/such/m; "),
    ],
)
def test_what_is_missing_or_unsupported_is_named(tmp_path: Path, flat: dict[str, object], message: str) -> None:
    assert refusal(tmp_path, flat).startswith(message)


def test_float32_needs_an_attention_that_has_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, fp32=True)
    assert "--ext.fp32 does not go with --ds.attn_implementation flash_attention_2" in message and "sdpa" in message
    check(settings(tmp_path, {"ds.attn_implementation": "sdpa"}, fp32=True))


def test_lora_passes_where_each_process_holds_whole_layers(tmp_path: Path) -> None:
    check(settings(tmp_path, {"ds.lora.rank": 1, "ds.lora.dropout": 0.1}))
    check(settings(tmp_path, {"ds.zero_stage": 3, "ds.tensor_parallel_size": 2}))


def test_a_reward_file_beside_an_agent_is_neither_used_nor_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (("agent.py", ""), ("reward.py", "raise ValueError")):
        (tmp_path / name).write_text(text)
    flat = {"train.agent_func_path": str(tmp_path / "agent.py"), "reward.remote_url": str(tmp_path / "reward.py")}
    checked = settings(tmp_path, flat)
    check(checked)
    check_reward_file(checked)
    assert f"--reward.remote_url {tmp_path / 'reward.py'} is not used" in caplog.text


def test_limits_themselves_pass(tmp_path: Path) -> None:
    check(settings(tmp_path, {"eval.temperature": 0.0, "eval.steps": 1, "ckpt.save_steps": 1, "ckpt.max_num": 1}))
    check(settings(tmp_path, {"reward.overlong_buffer_len": 32.0, "reward.stop_properly_penalty_coef": -0.5}))
    check(settings(tmp_path, {}, max_rollouts=16 * 8))


@pytest.mark.parametrize(
    ("flat", "ext", "message"),
    [
        # One step is 16 x 8 = 128 rollouts.
        ({}, {"max_rollouts": 127}, "--ext.max_rollouts 127 is less than one step of "),
        (
            {},
            {"max_steps": 50, "replay": ReplayConfig(warmup_steps=50)},
            "--ext.replay.warmup_steps 50 is not over within the run of --ext.max_steps 50, ",
        ),
        (
            {},
            {"max_steps": 3, "fill": FillConfig(min_age=3)},
            "--ext.fill.min_age 3 is not over within the run of --ext.max_steps 3, ",
        ),
        ({}, {"fill": FillConfig(max_frac=0.06)}, "--ext.fill.max_frac 0.06 of --rollout.batch_size 16 groups is "),
        ({}, {"eval": EvalConfig(final_samples=8)}, "--ext.eval.final_samples 8 has nothing to evaluate; "),
        ({}, {"eval": EvalConfig(every_rollouts=64)}, "--ext.eval.every_rollouts 64 has nothing to evaluate; "),
        ({"ckpt.disable_ds": True}, {"resume": "auto"}, "--ext.resume auto goes on from checkpoints that --ckpt.disa"),
        ({"ckpt.disable_ds": True, "ckpt.load_enable": True}, {}, "--ckpt.load_enable goes on from checkpoints that "),
        ({"train.enable_ema": True}, {"resume": "auto"}, "--ext.resume auto with --train.enable_ema would lose the "),
        (
            {},
            {"dapo": DapoConfig(prompts_per_round=5, max_rounds=3)},
            "--ext.dapo.prompts_per_round 5 x --ext.dapo.max_rounds 3 is less than --rollout.batch_size 16, ",
        ),
        (
            {},
            {"pilot": PilotConfig(prompts_per_round=15, max_rounds=1)},
            "--ext.pilot.prompts_per_round 15 x --ext.pilot.max_rounds 1 is less than --rollout.batch_size 16, ",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path: Path, flat, ext, message: str) -> None:
    assert refusal(tmp_path, {**REPLAY, **flat}, **{"groups": GroupsConfig(), **ext}).startswith(message)


def test_what_ends_just_in_time_passes(tmp_path: Path) -> None:
    parts = {"groups": GroupsConfig(), "replay": ReplayConfig(warmup_steps=2), "fill": FillConfig(min_age=2)}
    check(settings(tmp_path, REPLAY, max_steps=3, **parts))
    check(settings(tmp_path, REPLAY, groups=GroupsConfig(), fill=FillConfig(max_frac=1 / 16)))
    check(settings(tmp_path, {}, dapo=DapoConfig(prompts_per_round=8, max_rounds=2)))
    check(settings(tmp_path, {"ckpt.disable_ds": True}))


def test_what_may_do_nothing_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The 32 groups of 2 full steps are younger than 3 steps; a 33rd place keeps one that is old enough.
    for capacity in (33, 32):
        caplog.clear()
        fill = FillConfig(min_age=3, capacity=capacity)
        check(settings(tmp_path, REPLAY, groups=GroupsConfig(), fill=fill))
        assert ("--ext.fill.capacity 32: after 2 steps" in caplog.text) == (capacity == 32)
    check(settings(tmp_path, {"eval.steps": 5}))
    assert "--eval.steps 5 has nothing to evaluate without --eval.dataset" in caplog.text


@pytest.mark.parametrize("shares", ["0.5", "0.5,x", "0.5,0.6", "-0.5,1.5", "0.2,0.3,0.5"])
def test_shares_of_data_sets_are_one_number_for_each(tmp_path: Path, shares: str) -> None:
    two = {"data.prompt_dataset": "organization/a,organization/b"}
    check(settings(tmp_path, {**two, "data.prompt_probs": "0.25,0.75"}))
    assert refusal(tmp_path, {**two, "data.prompt_probs": shares}).startswith(f"--data.prompt_probs {shares} must be ")


def test_rollouts_of_a_step_must_be_whole_train_batches(tmp_path: Path) -> None:
    # 16 x 8 = 128 rollouts; the divisors of 128 next to 48 are 32 (16 away) and 64 (16 away): the larger is offered.
    message = refusal(tmp_path, {"train.batch_size": 48})
    assert "--rollout.batch_size 16 x --rollout.n_samples_per_prompt 8 = 128 rollouts is not a multiple" in message
    assert message.endswith("--train.batch_size 64 would fit")


def test_a_train_batch_must_be_whole_micro_batches_on_every_rank(tmp_path: Path) -> None:
    # 64 rollouts on 2 ranks: micro-batches of 8 give 64 / (8 x 2) = 4 each, micro-batches of 24 do not divide.
    message = refusal(tmp_path, {"train.micro_batch_size": 24})
    assert "--train.batch_size 64 is not a multiple of --train.micro_batch_size 24 x 2 data-parallel ranks" in message


@pytest.mark.parametrize(
    ("ext", "flag"),
    [
        ({"dapo": DapoConfig()}, "--ext.dapo "),
        ({"pilot": PilotConfig()}, "--ext.pilot "),
        ({"groups": GroupsConfig("drop")}, "--ext.groups.ineffective drop "),
    ],
)
def test_two_filters_of_groups_contradict_each_other(tmp_path: Path, ext: dict[str, object], flag: str) -> None:
    message = refusal(tmp_path, {"algo.dynamic_filtering_enable": True}, **ext)
    assert message.startswith(flag)
    assert message.endswith("remove --algo.dynamic_filtering_enable")


def test_keeping_ineffective_groups_agrees_with_dynamic_filtering(tmp_path: Path) -> None:
    check(settings(tmp_path, {"algo.dynamic_filtering_enable": True}, groups=GroupsConfig("keep")))


@pytest.mark.parametrize(
    ("estimator", "ext", "reason"),
    [
        ("group_norm", {}, "--algo.advantage.estimator group_norm"),
        ("reinforce", {"dapo": DapoConfig()}, "--ext.dapo"),
        ("reinforce", {"pilot": PilotConfig()}, "--ext.pilot"),
        ("reinforce", {"groups": GroupsConfig()}, "--ext.groups"),
    ],
)
def test_groups_need_two_rollouts(tmp_path: Path, estimator: str, ext: dict[str, object], reason: str) -> None:
    one = {"rollout.n_samples_per_prompt": 1, "train.batch_size": 16, "algo.advantage.estimator": estimator}
    assert f"must be at least 2 with {reason}, got 1" in refusal(tmp_path, one, **ext)


def test_one_rollout_is_enough_without_groups(tmp_path: Path) -> None:
    one = {"rollout.n_samples_per_prompt": 1, "train.batch_size": 16, "algo.advantage.estimator": "reinforce"}
    check(settings(tmp_path, one))


def test_a_prompt_pool_that_nothing_reports_to_is_refused(tmp_path: Path) -> None:
    pool = PoolConfig(exclude_epochs=2)
    check(settings(tmp_path, {}, pilot=PilotConfig(), pool=pool))
    with pytest.raises(ValueError, match="--ext.pool needs --ext.pilot"):
        check(settings(tmp_path, {}, pool=pool))


def test_pilots_of_a_quarter_of_a_group_pass(tmp_path: Path) -> None:
    check(settings(tmp_path, {}, pilot=PilotConfig(), mopps=MoppsConfig()))
    check(settings(tmp_path, {}, pilot=PilotConfig(n_pilot=8, commit_only=True), groups=GroupsConfig("drop")))
    check(settings(tmp_path, {}, pilot=PilotConfig(n_pilot=8, n_effective=7)))


@pytest.mark.parametrize(
    ("pilot", "message"),
    # Groups of 8, batches of 16.
    [
        ({"n_pilot": 8}, "--ext.pilot.n_pilot 8 leaves no rollout to commit of --rollout.n_samples_per_prompt 8; "),
        ({"n_effective": 3}, "--ext.pilot.n_effective 3 is more than --ext.pilot.n_pilot 2 (a quarter of 8); give at"),
        ({"n_effective": 1, "commit_only": True}, "--ext.pilot.n_effective trains pilots, --ext.pilot.commit_only"),
        # 0 of 1 is too hard, 1 of 1 too easy.
        ({"n_pilot": 1}, "--ext.pilot.n_pilot 1: no number of correct pilots is an accuracy from --ext.pilot.p_lower"),
        # 1/4 < .3 and .45 < 2/4.
        ({"n_pilot": 4, "p_lower": 0.3, "p_upper": 0.45}, "--ext.pilot.n_pilot 4: no number of correct pilots"),
        ({"max_survivors": 15}, "--ext.pilot.max_survivors 15: fewer prompts could wait than a batch commits (--roll"),
    ],
)
def test_pilots_that_could_not_work_are_refused(tmp_path: Path, pilot: dict[str, object], message: str) -> None:
    assert refusal(tmp_path, {}, pilot=PilotConfig(**pilot)).startswith(message)


def test_a_quarter_of_a_small_group_is_too_few_pilots(tmp_path: Path) -> None:
    small = {"rollout.n_samples_per_prompt": 4, "train.batch_size": 32}
    message = refusal(tmp_path, small, pilot=PilotConfig())
    assert message.startswith("--ext.pilot.n_pilot 1 (a quarter of 4): no number of correct pilots")
    check(settings(tmp_path, small, pilot=PilotConfig(n_pilot=2)))


def test_pilots_and_dynamic_sampling_contradict_each_other(tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, pilot=PilotConfig(), dapo=DapoConfig())
    assert message.startswith("--ext.pilot and --ext.dapo both decide which prompts are trained; ")


@pytest.mark.parametrize(
    ("part", "values", "key"),
    [
        (PilotConfig, {"n_pilot": 0}, "ext.pilot.n_pilot"),
        (PilotConfig, {"n_effective": 0}, "ext.pilot.n_effective"),
        (PilotConfig, {"prompts_per_round": 0}, "ext.pilot.prompts_per_round"),
        (PilotConfig, {"max_rounds": 0}, "ext.pilot.max_rounds"),
        (PilotConfig, {"max_survivors": 0}, "ext.pilot.max_survivors"),
        (PilotConfig, {"max_age": -1}, "ext.pilot.max_age"),
        (PilotConfig, {"p_lower": 0.8}, "ext.pilot.p_lower"),
        (PilotConfig, {"p_solve": 0.7}, "ext.pilot.p_lower"),
        (PilotConfig, {"p_solve": float("nan")}, "ext.pilot.p_lower"),
        (PoolConfig, {"exclude_min_rollouts": 0}, "ext.pool.exclude_min_rollouts"),
        (PoolConfig, {"exclude_min_visits": 0}, "ext.pool.exclude_min_visits"),
        (PoolConfig, {"exclude_epochs": 0}, "ext.pool.exclude_epochs"),
        (PoolConfig, {"floor": 1.1}, "ext.pool.floor"),
        (MoppsConfig, {"candidates": 1}, "ext.mopps.candidates"),
        (MoppsConfig, {"target": -0.1}, "ext.mopps.target"),
        (MoppsConfig, {"decay": 1.5}, "ext.mopps.decay"),
    ],
)
def test_settings_of_prompt_selection_have_a_range(part: type, values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match="must") as caught:
        part(**values)
    assert caught.value.key == key


@pytest.mark.parametrize("template", ["Answer in \\boxed{{}}. Q: {}", "{}", "A {{b}} {}"])
def test_a_template_with_doubled_braces_passes(tmp_path: Path, template: str) -> None:
    check(settings(tmp_path, {"data.input_template": template}))


@pytest.mark.parametrize("template", ["Answer in \\boxed{}. Q: {}", "{} {name}", "{} {", "{} }", "{} {0.x}"])
def test_a_template_with_other_braces_is_refused(tmp_path: Path, template: str) -> None:
    message = refusal(tmp_path, {"data.input_template": template})
    assert message.endswith("double the other braces, as in \\boxed{{}}")


def test_a_template_that_drops_the_prompt_is_refused(tmp_path: Path) -> None:
    assert "has no {}, where the prompt goes" in refusal(tmp_path, {"data.input_template": "Q:"})
    chat = {"data.input_template": "Q: {}", "data.apply_chat_template": True}
    assert "would be ignored with --data.apply_chat_template" in refusal(tmp_path, chat)


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    flat = {"reward.remote_url": None, "reward.model_name_or_path": "a/b"}
    assert refusal(tmp_path, flat).startswith("a reward model (--reward.model_name_or_path) is not supported: ")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here' (reward.py:1)"),
        ("def reward(queries, prompts, labels): ...", "has no attribute 'reward_func'"),
        ("def reward_func(queries, prompts, labels): ...", None),
    ],
)
def test_a_reward_file_is_loaded_before_anything_starts(tmp_path: Path, source: str, problem: str | None) -> None:
    file = tmp_path / "reward.py"
    file.write_text(source + "\n")
    checked = settings(tmp_path, {"reward.remote_url": str(file)})
    if problem is None:
        check_reward_file(checked)
        return
    with pytest.raises(ValueError, match="Cannot load reward file") as error:
        check_reward_file(checked)
    assert problem in str(error.value)


def test_pass_at_k_needs_k_samples(tmp_path: Path) -> None:
    flat = {"eval.dataset": "organization/data", "eval.n_samples_per_prompt": 4}
    message = refusal(tmp_path, flat)
    assert message.startswith("pass@8 needs at least 8 samples, but --eval.n_samples_per_prompt is 4; ")
    assert message.endswith("set --eval.n_samples_per_prompt 8 or --ext.eval.pass_at 1 2 4")
    check(settings(tmp_path, flat, eval=EvalConfig(pass_at=(1, 4))))


def test_a_run_directory_with_a_run_is_only_continued(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    check(settings(tmp_path, {}))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "already holds a run, which would be overwritten" in refusal(tmp_path, {})
    check(settings(tmp_path, {"ckpt.load_enable": True}))


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert "is a file; name a directory" in refusal(tmp_path, {})


def test_files_that_are_there_pass(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        (tmp_path / "model" / name).write_text("{}")
    for name in ("reward.py", "a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("")
    here = {
        "actor.model_name_or_path": str(tmp_path / "model"),
        "reward.remote_url": str(tmp_path / "reward.py"),
        "data.prompt_dataset": f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl",
    }
    check(settings(tmp_path, here))


def test_a_model_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    message = refusal(tmp_path, {"actor.model_name_or_path": str(tmp_path / "model")})
    assert message.startswith("--actor.model_name_or_path: ") and "has no config.json" in message


def test_a_model_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    message = refusal(tmp_path, {"actor.model_name_or_path": str(tmp_path / "model")})
    assert message.endswith("has no weights (.safetensors, .bin, .pt); copy or download the model again")


def test_one_local_file_of_a_flag_is_read_and_several_are_checked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"input": "y"}\n{}\n')
    one, bad = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    files = read_prompt_files(settings(tmp_path, {"data.prompt_dataset": one, "eval.dataset": "organization/data"}))
    assert [row.input for row in files["data.prompt_dataset"].rows] == ["x"]
    assert set(files) == {"data.prompt_dataset"}
    assert read_prompt_files(settings(tmp_path, {"data.prompt_dataset": f"{one},{one}"})) == {}

    skip = DataConfig(on_bad_row="skip")
    files = read_prompt_files(settings(tmp_path, {"eval.dataset": bad}, data=skip))
    assert [row.input for row in files["eval.dataset"].rows] == ["y"]
    with pytest.raises(ValueError, match="b.jsonl:2: "):
        read_prompt_files(settings(tmp_path, {"data.prompt_dataset": f"{one},{bad}"}, data=skip))


PPO_LOSS = {"actor.policy_loss_type": "ppo"}


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "gae"])
def test_filling_goes_with_baselines_of_a_group_or_a_critic(tmp_path: Path, estimator: str) -> None:
    flat = {**PPO_LOSS, "algo.advantage.estimator": estimator}
    check(settings(tmp_path, flat, groups=GroupsConfig(), fill=FillConfig()))


@pytest.mark.parametrize(
    ("flat", "fill", "start", "way_out"),
    [
        (
            {"algo.dynamic_filtering_enable": True},
            FillConfig(),
            "--ext.fill and --algo.dynamic_filtering_enable both handle zero-variance groups",
            "remove --algo.dynamic_filtering_enable",
        ),
        (
            {"algo.advantage.estimator": "reinforce_baseline"},
            FillConfig(),
            "--ext.fill does not go with --algo.advantage.estimator reinforce_baseline, whose baseline or scale",
            "use one of group_norm, rloo, dr_grpo, gae",
        ),
        (
            {"actor.policy_loss_type": "gspo"},
            FillConfig(),
            "--ext.fill does not go with --actor.policy_loss_type gspo: its ratio is for a whole sequence",
            "use --actor.policy_loss_type ppo",
        ),
        (
            {"algo.advantage.estimator": "gae"},
            FillConfig(store="all"),
            "--ext.fill.store all does not go with --algo.advantage.estimator gae",
            "use another estimator or --ext.fill.store effective",
        ),
        (
            {"rollout.n_samples_per_prompt": 1, "train.batch_size": 16, "algo.advantage.estimator": "gae"},
            FillConfig(),
            "--rollout.n_samples_per_prompt must be at least 2 with --ext.groups, got 1",
            "8 is usual",
        ),
    ],
)
def test_what_filling_does_not_go_with_is_refused(tmp_path: Path, flat, fill, start: str, way_out: str) -> None:
    message = refusal(tmp_path, {**PPO_LOSS, **flat}, groups=GroupsConfig(), fill=fill)
    assert message.startswith(start) and message.endswith(way_out)


def test_filling_needs_to_know_what_an_informative_group_is(tmp_path: Path) -> None:
    assert refusal(tmp_path, PPO_LOSS, fill=FillConfig()).startswith("--ext.fill needs --ext.groups, which says")


# -- replay --

REPLAY = {**PPO_LOSS, "algo.kl.init_coef": 0.0, "algo.kl.use_loss": False}
DROP = GroupsConfig(ineffective="drop")


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo"])
def test_replay_goes_with_baselines_of_a_group(tmp_path: Path, estimator: str) -> None:
    flat = {**REPLAY, "algo.advantage.estimator": estimator}
    throttle = ThrottleConfig()
    check(settings(tmp_path, flat, groups=DROP, replay=ReplayConfig(composition="pool")))
    check(settings(tmp_path, flat, groups=GroupsConfig(), replay=ReplayConfig(), fill=FillConfig(), throttle=throttle))
    check(
        settings(
            tmp_path, {**flat, "algo.kl.init_coef": 0.1, "algo.kl.use_loss": True}, groups=DROP, replay=ReplayConfig()
        )
    )
    check(settings(tmp_path, flat, success_replay=SuccessReplayConfig()))


@pytest.mark.parametrize(
    ("flat", "ext", "start", "way_out"),
    [
        ({}, {"groups": None}, "--ext.replay needs --ext.groups, which says", "add groups: {}"),
        (
            {"algo.dynamic_filtering_enable": True},
            {"groups": GroupsConfig()},
            "--ext.replay and --algo.dynamic_filtering_enable both handle zero-variance groups",
            "remove --algo.dynamic_filtering_enable",
        ),
        (
            {"algo.advantage.estimator": "gae"},
            {},
            "--ext.replay does not go with --algo.advantage.estimator gae: a replayed rollout keeps one advantage",
            "use one of group_norm, rloo, dr_grpo",
        ),
        (
            {"algo.advantage.estimator": "reinforce_baseline"},
            {},
            "--ext.replay does not go with --algo.advantage.estimator reinforce_baseline",
            "use one of group_norm, rloo, dr_grpo",
        ),
        (
            {"algo.kl.init_coef": 0.01},
            {},
            "--ext.replay does not go with --algo.kl.init_coef 0.01 in the reward",
            "set --algo.kl.init_coef 0, or --algo.kl.use_loss",
        ),
        (
            {"actor.policy_loss_type": "gspo"},
            {},
            "--ext.replay does not go with --actor.policy_loss_type gspo",
            "use --actor.policy_loss_type ppo",
        ),
        (
            {},
            {"groups": GroupsConfig(), "replay": ReplayConfig(composition="pool")},
            "--ext.replay.composition pool draws the whole batch from informative rollouts",
            "use --ext.groups.ineffective drop",
        ),
        (
            {},
            {"fill": FillConfig(), "replay": ReplayConfig(composition="pool")},
            "--ext.replay.composition pool draws the whole batch, which leaves no slots for --ext.fill",
            "or --ext.fill null",
        ),
        (
            {},
            {"throttle": ThrottleConfig(), "replay": ReplayConfig(composition="pool")},
            "--ext.throttle cannot act on --ext.replay.composition pool",
            "remove it",
        ),
        (
            {},
            {"throttle": ThrottleConfig(), "replay": None},
            "--ext.throttle has nothing to act on without --ext.fill or --ext.replay",
            "remove it",
        ),
        (
            {"algo.dynamic_filtering_enable": True},
            {"groups": None, "replay": None, "success_replay": SuccessReplayConfig()},
            "--ext.success_replay and --algo.dynamic_filtering_enable both handle zero-variance groups",
            "remove --algo.dynamic_filtering_enable",
        ),
        (
            {},
            {"dapo": DapoConfig(), "success_replay": SuccessReplayConfig()},
            "--ext.success_replay and --ext.dapo both decide what becomes of failed groups",
            "remove one",
        ),
        (
            {"algo.advantage.estimator": "gae"},
            {"replay": None, "success_replay": SuccessReplayConfig()},
            "--ext.success_replay does not go with --algo.advantage.estimator gae",
            "use one of rloo, reinforce_baseline, group_norm, dr_grpo",
        ),
    ],
)
def test_what_replay_does_not_go_with_is_refused(tmp_path: Path, flat, ext, start: str, way_out: str) -> None:
    message = refusal(tmp_path, {**REPLAY, **flat}, **{"groups": DROP, "replay": ReplayConfig(), **ext})
    assert message.startswith(start) and message.endswith(way_out)
