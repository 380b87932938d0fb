"""Every name, signature and field of the installed stack that the adapters rely on: an upgrade fails here, by name."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from importlib.metadata import version

import pytest
import torch

from openrlhf_ext.adapters.upstream import plain

pytestmark = pytest.mark.contract

ACTOR = "openrlhf.trainer.ray.ppo_actor"
CRITIC = "openrlhf.trainer.ray.ppo_critic"
ENGINE = "openrlhf.trainer.ray.vllm_engine"
LAUNCHER = "openrlhf.trainer.ray.launcher"
TRAINER = "openrlhf.trainer.ppo_trainer"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience"
SAMPLES = "openrlhf.trainer.ppo_utils.samples_generator"
ACTOR_STEP = f"{ACTOR}:ActorPPOTrainer.training_step"
EXECUTOR = "openrlhf.utils.agent:SingleTurnAgentExecutor"
HEAD = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
ENGINES_PARAMETERS = (
    "num_engines tensor_parallel_size pretrain seed full_determinism enable_prefix_caching enforce_eager max_model_len"
    " shared_pg gpu_memory_utilization vllm_enable_sleep logprobs_mode agent_func_path remote_rm_url"
    " max_images_per_prompt"
)

# Name to parameters, in order, without self; "*" and "**" mark the variadic ones. Ray's decorators are looked through.
SIGNATURES = {
    # adapters/actors.py
    f"{ACTOR}:PolicyModelActor.init_model_from_pretrained": "strategy pretrain max_steps vllm_engines",
    f"{ACTOR}:PolicyModelActor.fit": "kl_ctl",
    f"{ACTOR}:PolicyModelActor.forward": "sequences action_mask attention_mask packed_seq_lens mm_train_inputs_list",
    f"{ACTOR}:PolicyModelActor.broadcast_to_vllm": "",
    f"{ACTOR}:PolicyModelActor.get_checkpoint_states": "",
    f"{ACTOR}:PolicyModelActor.save_checkpoint": "tag client_states metric_value metric_key",
    f"{ACTOR}:PolicyModelActor.save_model": "",
    f"{ACTOR}:ActorPPOTrainer._init_vllm_sync_group": "backend",
    f"{ACTOR}:ActorPPOTrainer.broadcast_to_vllm": "",
    ACTOR_STEP: "experience kl_ctl step loss_batch_info",
    f"{CRITIC}:CriticModelActor.init_model_from_pretrained": "strategy pretrain max_steps",
    f"{CRITIC}:CriticModelActor.fit": "",
    f"{CRITIC}:CriticPPOTrainer.training_step": "experience step loss_batch_info",
    "openrlhf.models:PolicyLoss.forward": (
        "log_probs old_log_probs advantages action_mask rollout_log_probs dp_size batch_num_tokens global_batch_size"
    ),
    "openrlhf.models:ValueLoss.forward": (
        "values old_values returns action_mask dp_size batch_num_tokens global_batch_size"
    ),
    # adapters/placement.py, adapters/launch.py
    f"{LAUNCHER}:RayActorGroup": (
        "num_nodes num_gpus_per_node ray_actor_type pg num_gpus_per_actor duplicate_actors resources"
        " num_resources_per_node"
    ),
    f"{LAUNCHER}:RayActorGroup.async_init_model_from_pretrained": "*args **kwargs",
    f"{LAUNCHER}:RayActorGroup.async_run_method": "method_name *args **kwargs",
    f"{LAUNCHER}:RayActorGroup.async_run_method_batch": "method_name **kwargs",
    f"{LAUNCHER}:RayActorGroup.async_save_model": "",
    f"{LAUNCHER}:ReferenceModelActor.init_model_from_pretrained": "strategy pretrain",
    f"{ENGINE}:create_vllm_engines": ENGINES_PARAMETERS,
    "openrlhf.utils:get_strategy": "args",
    "openrlhf.utils:get_tokenizer": "pretrain model padding_side strategy use_fast",
    "ray:wait": "ray_waitables num_returns timeout fetch_local",
    "ray:cancel": "ray_waitable force recursive",
    "ray.util.placement_group:placement_group": (
        "bundles strategy name lifetime _soft_target_node_id bundle_label_selector"
    ),
    "ray.util.placement_group:PlacementGroup.wait": "timeout_seconds",
    "ray.util.placement_group:remove_placement_group": "placement_group",
    # adapters/cluster.py
    "ray._private.authentication.authentication_token_setup:ensure_token_if_auth_enabled": (
        "system_config create_token_if_missing"
    ),
    "ray._private.services:canonicalize_bootstrap_address": "addr temp_dir",
    "ray._private.state:available_resources_per_node": "",
    "ray._private.utils:set_sigterm_handler": "sigterm_handler",
    # adapters/engine.py
    f"{ENGINE}:RolloutRayActor": "*args bundle_indices agent_func_path remote_rm_url mm_pad_token_ids **kwargs",
    f"{ENGINE}:RolloutRayActor.init_process_group": (
        "master_address master_port rank_offset world_size group_name backend use_ray"
    ),
    f"{ENGINE}:RolloutRayActor.generate": "prompt_token_ids sampling_params multi_modal_data",
    f"{ENGINE}:RolloutRayActor.reset_prefix_cache": "",
    f"{ENGINE}:RolloutRayActor.sleep": "level",
    f"{ENGINE}:RolloutRayActor.wake_up": "tags",
    f"{ENGINE}:_load_agent_executor": "agent_func_path",
    "openrlhf.utils.agent:MultiTurnAgentExecutor": "agent_instance_cls",
    EXECUTOR: "remote_rm_url",
    f"{EXECUTOR}.execute": ("prompt label sampling_params max_length hf_tokenizer llm_engine images"),
    "vllm:SamplingParams.clone": "",
    "vllm:AsyncLLMEngine.collective_rpc": "method timeout args kwargs",
    "vllm:AsyncLLMEngine.reset_encoder_cache": "",
    "ray.actor:exit_actor": "",
    # adapters/cpu_platform.py
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": (
        "weights_iterator weights_path is_checkpoint_format"
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": "",
    f"{HEAD}.process_weights_after_loading": "layer",
    # adapters/vision.py
    "openrlhf.utils.vlm_utils:process_prompt_with_images": "processor prompt images",
    "openrlhf.utils.vlm_utils:load_images": "image_refs",
    "openrlhf.utils.vlm_utils:dedup_media_tokens": "token_ids pad_token_ids",
    "openrlhf.utils.utils:convert_to_torch_dtype": "param_dtype",
    "transformers:Qwen2_5_VLProcessor._get_num_multimodal_tokens": "image_sizes video_sizes **kwargs",
    # adapters/lora.py
    "openrlhf.utils.deepspeed:DeepspeedStrategy.save_model": "model tokenizer output_dir **kwargs",
    "openrlhf.utils.deepspeed:DeepspeedStrategy._unwrap_model": "model",
    "peft.tuners.lora:Linear.get_delta_weight": "adapter",
    "peft:PeftModel.get_base_model": "",
    # adapters/experience_maker.py
    "openrlhf.trainer.ppo_utils.length_penalty:apply_length_penalties": "experiences args",
    f"{MAKER}:RemoteExperienceMaker": (
        "actor_model_group critic_model_group reward_model_group initial_model_group kl_controller strategy tokenizer"
        " **kwargs"
    ),
    f"{MAKER}:RemoteExperienceMaker.split_rollout_samples": "rollout_samples",
    f"{MAKER}:RemoteExperienceMaker.make_experience_batch": "rollout_samples",
    f"{MAKER}:RemoteExperienceMaker.make_experience": "samples_list",
    f"{MAKER}:RemoteExperienceMaker.compute_advantages_and_returns": "experiences",
    f"{EXPERIENCE}:Experience.concat_experiences": "experiences_list pad_token_id",
    f"{EXPERIENCE}:Experience.to_device": "device",
    f"{EXPERIENCE}:make_experience_batch": "items packing_samples",
    f"{EXPERIENCE}:split_experience_batch": "experience",
    f"{EXPERIENCE}:remove_padding_in_sequences": "items",
    # adapters/generation.py, adapters/data.py
    f"{SAMPLES}:SamplesGenerator._process_response_into_experience": "response **generate_kwargs",
    "openrlhf.datasets:PromptDataset": "dataset tokenizer strategy input_template",
    "openrlhf.datasets.utils:blending_datasets": (
        "datasets probabilities strategy seed max_count stopping_strategy dataset_split"
    ),
    # adapters/trainer.py
    f"{TRAINER}:BasePPOTrainer": (
        "strategy actor_model_group critic_model_group reward_model_group reference_model_group vllm_engines tokenizer"
    ),
    f"{TRAINER}:BasePPOTrainer.ppo_train": "global_steps",
    f"{TRAINER}:BasePPOTrainer.broadcast_to_vllm": "",
    f"{TRAINER}:BasePPOTrainer.save_best_checkpoint": "eval_metrics global_step client_states",
    f"{TRAINER}:BasePPOTrainer.save_logs_and_checkpoints": "global_step logs_dict client_states",
    f"{TRAINER}:BasePPOTrainer.init_checkpoint_states": "",
    f"{TRAINER}:BasePPOTrainer.restore_best_checkpoint_state": "checkpoint_states",
    "openrlhf.trainer.ppo_utils.kl_controller:FixedKLController.update": "current n_steps",
    "openrlhf.trainer.ppo_utils.kl_controller:AdaptiveKLController.update": "current n_steps",
    # DeepSpeed
    "deepspeed:DeepSpeedEngine.set_gradient_accumulation_boundary": "is_boundary",
    "deepspeed:DeepSpeedEngine.gradient_accumulation_steps": "",
    "deepspeed:zero.GatheredParameters": "params modifier_rank fwd_module enabled",
}

# Name to text that its source must hold: what is relied on beyond a signature.
SOURCE = {
    "the policy actor creates its trainer by a name of its module": (
        f"{ACTOR}:PolicyModelActor.init_model_from_pretrained",
        "self.trainer = ActorPPOTrainer(",
    ),
    "the policy actor keeps model and schedule where ours are put": (
        f"{ACTOR}:PolicyModelActor.init_model_from_pretrained",
        "self.actor, self.actor_optim, self.actor_scheduler = strategy.prepare(",
    ),
    "the critic actor keeps model and schedule where ours are put": (
        f"{CRITIC}:CriticModelActor.init_model_from_pretrained",
        "self.critic, self.critic_optim, self.critic_scheduler = strategy.prepare(",
    ),
    "the actor's trainer sets up its own weight group by that method": (
        f"{ACTOR}:ActorPPOTrainer.__init__",
        "self._init_vllm_sync_group(backend)",
    ),
    "the actor's trainer reads the optimizer boundary from its buffer": (
        ACTOR_STEP,
        "if self.replay_buffer.dynamic_optimizer_step[step]:",
    ),
    "the actor's trainer reads the loss scale from its buffer": (
        ACTOR_STEP,
        "self.replay_buffer.dynamic_sample_loss_scale[step]",
    ),
    "the critic's trainer reads the optimizer boundary from its buffer": (
        f"{CRITIC}:CriticPPOTrainer.training_step",
        "if self.replay_buffer.dynamic_optimizer_step[step]:",
    ),
    "the actor's trainer reports the learning rate of its schedule": (
        ACTOR_STEP,
        "self.actor_scheduler.get_last_lr()",
    ),
    "given loss counts are used as they are": (ACTOR_STEP, "**loss_batch_info"),
    "engines are created from a name of their module": (
        f"{ENGINE}:create_vllm_engines",
        "vllm_engines.append(\n            RolloutRayActor.options(",
    ),
    "engines get the worker extension as a keyword": (f"{ENGINE}:create_vllm_engines", '"worker_extension_cls":'),
    "an engine keeps its executor where ours finds it": (f"{ENGINE}:RolloutRayActor.__init__", "self.executor ="),
    "an engine keeps its keywords where ours finds them": (f"{ENGINE}:RolloutRayActor.__init__", "self.kwargs ="),
    "an engine keeps vLLM where ours finds it": (f"{ENGINE}:RolloutRayActor.__init__", "self.llm ="),
    "an engine aborts what is cancelled, through vLLM's generator": (
        f"{ENGINE}:RolloutRayActor.generate",
        "async for request_output in generator",
    ),
    "the executor calls the reward function that it holds": (
        f"{EXECUTOR}._fetch_rewards_via_func",
        "self.reward_func,",
    ),
    "the executor keeps the reward files": (f"{EXECUTOR}.__init__", "self.reward_endpoints ="),
    "a response is made into an experience without the generator": (
        f"{SAMPLES}:SamplesGenerator._process_response_into_experience",
        'generate_kwargs.get("max_len"',
    ),
    "the experience maker keeps the arguments": (f"{MAKER}:RemoteExperienceMaker.__init__", "self.args ="),
    "a group keeps its handles": (f"{LAUNCHER}:RayActorGroup._initiate_actors", "self._actor_handlers ="),
    "a group keeps its duplication": (f"{LAUNCHER}:RayActorGroup.__init__", "self.duplicate_actors ="),
    "the trainer keeps the metric of its best checkpoint": (
        f"{TRAINER}:BasePPOTrainer.__init__",
        "self.best_eval_metric_key =",
    ),
    "the trainer keeps the KL controller": (f"{TRAINER}:BasePPOTrainer.__init__", "self.kl_ctl ="),
    "vLLM on CPU keeps one process when the variable says so": (
        "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        'os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1"',
    ),
    "DeepSpeed divides every loss by its configured steps": (
        "deepspeed:DeepSpeedEngine",
        "loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss",
    ),
    "DeepSpeed asks a set boundary before its counter": (
        "deepspeed:DeepSpeedEngine.is_gradient_accumulation_boundary",
        "if self._is_gradient_accumulation_boundary is None:",
    ),
    "DeepSpeed moves the schedule by this name": (
        "deepspeed:DeepSpeedEngine._take_model_step",
        "self.lr_scheduler.step(",
    ),
    "DeepSpeed saves the schedule by this name": (
        "deepspeed:DeepSpeedEngine",
        "lr_scheduler=self.lr_scheduler.state_dict()",
    ),
}

EXPERIENCE_FIELDS = (
    "sequences attention_mask action_mask action_log_probs base_action_log_probs rollout_log_probs values returns"
    " advantages kl rewards scores response_length truncated total_length index prompts labels images mm_train_inputs"
    " info"
)


def find(name: str) -> object:
    """The object at ``module:path``, with the plain class in place of a Ray actor class."""
    module, path = name.split(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
        if hasattr(found, "__ray_metadata__"):
            found = plain(found)
    return found


def parameters(function: object) -> str:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    ignored = ("self", "_ray_trace_ctx")  # the second is Ray's own, added to the methods of actor classes
    return " ".join(marks.get(p.kind, "") + p.name for p in found if p.name not in ignored)


@pytest.mark.parametrize(("package", "expected"), [("openrlhf", "0.11.2"), ("ray", "2.55.0")])
def test_version(package: str, expected: str) -> None:
    assert version(package) == expected


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert parameters(find(name)) == SIGNATURES[name]


@pytest.mark.parametrize(("name", "text"), SOURCE.values(), ids=SOURCE)
def test_source(name: str, text: str) -> None:
    assert text in inspect.getsource(find(name))


def test_fields_of_an_experience() -> None:
    assert " ".join(field.name for field in fields(find(f"{EXPERIENCE}:Experience"))) == EXPERIENCE_FIELDS


def test_policy_loss_gives_five_values_the_first_a_scalar_with_a_gradient() -> None:
    log_probs = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2)
    found = find("openrlhf.models:PolicyLoss")()(log_probs, torch.zeros(1, 2), torch.ones(1, 2), action_mask=mask)
    assert len(found) == 5 and found[0].shape == () and found[0].requires_grad


def test_vllm_takes_the_sampling_settings_and_returns_final_outputs_only() -> None:
    kind = find("vllm.sampling_params:RequestOutputKind").FINAL_ONLY
    settings = dict(temperature=0.5, top_p=0.9, max_tokens=8, min_tokens=0, skip_special_tokens=False, logprobs=1)
    params = find("vllm:SamplingParams")(**settings, output_kind=kind)
    assert {name: getattr(params.clone(), name) for name in settings} == settings and params.output_kind is kind


@pytest.mark.parametrize("name", ["ShareMemCommBuilder", "FusedAdamBuilder"])
def test_deepspeed_compiles_for_a_cpu_what_the_installation_builds(name: str) -> None:
    accelerator = find("deepspeed.accelerator.cpu_accelerator:CPU_Accelerator")()
    assert accelerator.get_op_builder(name).__name__ == name  # an unknown name gives a builder that raises


@pytest.mark.parametrize("name", ["ActorDiedError", "ActorUnavailableError", "RayActorError"])
def test_a_dead_engine_raises_what_the_controller_catches(name: str) -> None:
    assert issubclass(find("vllm.v1.engine.exceptions:EngineDeadError"), Exception)  # what ends the engine actor
    assert issubclass(find(f"ray.exceptions:{name}"), find("ray.exceptions:RayActorError"))
    assert not issubclass(find(f"ray.exceptions:{name}"), find("ray.exceptions:RayTaskError"))


def test_the_runtime_environment_takes_a_setup_hook_by_name() -> None:
    from ray.runtime_env import RuntimeEnv

    from openrlhf_ext.adapters import cpu_platform

    assert RuntimeEnv(worker_process_setup_hook=cpu_platform.HOOK)["worker_process_setup_hook"] == cpu_platform.HOOK


def test_importing_the_actors_puts_our_trainer_where_upstream_creates_its_own() -> None:
    from openrlhf_ext.adapters.actors import PolicyTrainer

    assert find(f"{ACTOR}:ActorPPOTrainer") is PolicyTrainer
