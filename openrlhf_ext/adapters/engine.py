"""The vLLM engine actor: OpenRLHF's, plus whole groups per call, a deadline, and killable rewards."""

from __future__ import annotations

import asyncio
import logging
import os

import ray
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, _load_agent_executor
from openrlhf.utils import get_tokenizer
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_ext.adapters import cpu_platform, vision
from openrlhf_ext.adapters.precision import to_torch_dtype
from openrlhf_ext.adapters.upstream import plain
from openrlhf_ext.config import RewardConfig
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, check_reward
from openrlhf_ext.rewards.worker import describe

logger = logging.getLogger(__name__)

# Key in a response's ``extra_logs`` that carries why its reward is unusable to the controller.
FAILURE_KEY = "_reward_failure"

_RESPONSE_KEYS = ("prompt", "label", "observation_tokens", "action_ranges", "rollout_log_probs", "reward")
"""What must be in a response that an agent file makes; see ``openrlhf.utils.agent``."""

_SEEDS_OF_A_TURN = 1 << 48
"""More than any seed of a request, and a 32,768th of what vLLM takes."""


class AgentFailure(str):
    """Why an agent file (``--train.agent_func_path``) made no rollout, as part of the answer to a request."""


def check_agent_file(path: str) -> None:
    """Load an agent file as the engines will. Raises ValueError when they could not use it."""
    try:
        _load_agent_executor(path)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--train.agent_func_path {path} cannot be used: {describe(error)}. It must be a Python file that defines "
            "AgentExecutor, a subclass of openrlhf.utils.agent.MultiTurnAgentExecutor or AgentExecutorBase that is "
            "created without arguments"
        ) from None


class Turns:
    """An engine as the executor of one rollout sees it: every turn is drawn with random numbers of its own.

    With one seed for the rollout, the second turn would be drawn with the numbers of the first, and would repeat it
    more often than the policy says.

    Args:
        seed: of the first turn; None draws from the engine's own stream.
    """

    def __init__(self, engine, seed: int | None) -> None:
        self._engine, self._seed = engine, seed
        self.has_failed = False
        """Whether the engine has raised."""

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        if sampling_params.seed != self._seed:
            sampling_params = sampling_params.clone()  # which the agent may use for other rollouts, too
            sampling_params.seed = self._seed
        if self._seed is not None:
            self._seed += _SEEDS_OF_A_TURN
        try:
            return await self._engine.generate(prompt_token_ids, sampling_params, multi_modal_data=multi_modal_data)
        except Exception:
            self.has_failed = True
            raise


class EngineActor(plain(RolloutRayActor)):
    """One vLLM engine in a Ray actor."""

    DTYPE: str | None = None
    """Instead of the one that OpenRLHF gives, which is always bfloat16."""

    async def __init__(self, *args, **kwargs) -> None:
        kwargs["dtype"] = self.DTYPE or kwargs["dtype"]
        if cpu_platform.active():
            # vLLM replaces the in-process executor by one more process when this is on; with one OpenMP thread
            # per process there is nothing to bind, and the process costs its imports and a hop per token.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            kwargs["worker_extension_cls"] = cpu_platform.WORKER_EXTENSION
            kwargs["enable_sleep_mode"] = False  # refused on CPU; going to sleep is then ignored
            kwargs |= cpu_platform.ENGINE_SETTINGS
        self._agent_file = kwargs.get("agent_func_path")
        await super().__init__(*args, **kwargs)

    def configure(self, strategy, reward: RewardConfig) -> None:
        """Load the tokenizer once (upstream pickles it into every call) and put the reward file behind a deadline."""
        self._tokenizer = get_tokenizer(
            self.kwargs["model"], None, "left", strategy, use_fast=not strategy.args.data.disable_fast_tokenizer
        )
        self._logit_bias = vision.forbidden_tokens(self._tokenizer)
        if vision.is_processor(self._tokenizer):
            vision.decode_as_written(self._tokenizer)
            vision.process_once(to_torch_dtype(strategy.args.ds.param_dtype))
        reads_file = isinstance(self.executor, SingleTurnAgentExecutor) and self.executor.reward_func is not None
        if reads_file and reward.deadline_s > 0:
            path = self.executor.reward_endpoints[0]
            self._pool = RewardPool(path, deadline_s=reward.deadline_s, workers=reward.workers)
            self.executor.reward_func = self._guarded_reward

    def _guarded_reward(self, queries, prompts, labels) -> dict:
        """Upstream's reward_func, run in a process that is killed at the deadline. Called from worker threads."""
        values = check_reward(self._pool(queries, prompts, labels), self._pool.path)
        if isinstance(values, RewardFailure):
            return {"rewards": None, "scores": None, "extra_logs": {FAILURE_KEY: (values.kind, values.detail)}}
        return {"rewards": values.reward, "scores": values.score, "extra_logs": values.extra}

    async def reset_prefix_cache(self) -> None:
        """Upstream's, and of what the vision encoder has made of images: no request may read that of old weights.

        vLLM keeps it from request to request, too. On CPU its worker forgets it with new weights but its scheduler
        does not, and the engine would die of the next image that was seen before.
        """
        await super().reset_prefix_cache()
        await self.llm.reset_encoder_cache()

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        """Upstream's; `vision.forbidden_tokens` are never sampled."""
        if self._logit_bias:
            sampling_params.logit_bias = {**(sampling_params.logit_bias or {}), **self._logit_bias}
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)

    async def generate_group(
        self,
        *,
        prompt,
        label,
        images,
        sampling: dict,
        max_length: int,
        num_rollouts: int,
        deadline_s: float,
        seed: int | None = None,
    ) -> tuple[list[dict], str | None]:
        """All rollouts of a prompt. With a ``seed``, rollout i draws from ``seed + i``, else from the engine's stream.

        Returns the finished responses and None, or those that finished and why the others did not: "deadline", an
        `AgentFailure`, or what went wrong in the engine. Requests still running at the deadline are aborted in the
        engine. When the engine's process has died, so does this actor: all its callers then see the same, a dead
        engine.
        """
        turns = [Turns(self, None if seed is None else seed + i) for i in range(num_rollouts)]
        tasks = [
            asyncio.ensure_future(
                self.executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=SamplingParams(
                        **sampling, output_kind=RequestOutputKind.FINAL_ONLY, seed=None if seed is None else seed + i
                    ),
                    max_length=max_length,
                    hf_tokenizer=self._tokenizer,
                    llm_engine=own,
                    images=images,
                )
            )
            for i, own in enumerate(turns)
        ]
        done, late = await asyncio.wait(tasks, timeout=deadline_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        failures = {task: task.exception() for task in done if task.exception() is not None}
        responses = [task.result() for task in tasks if task in done and task not in failures]
        if any(isinstance(error, EngineDeadError) for error in failures.values()):
            ray.actor.exit_actor()
        if failures:
            # Where the engine itself has failed, an agent's error only follows from it.
            by_engine = [failures[t] for t, own in zip(tasks, turns, strict=True) if own.has_failed and t in failures]
            error = (by_engine or list(failures.values()))[0]
            if self._agent_file and not by_engine:
                return responses, AgentFailure(f"{self._agent_file} raised {describe(error)}")
            return responses, f"{type(error).__name__}: {error}"
        if self._agent_file:
            missing = [key for response in responses for key in _RESPONSE_KEYS if key not in response]
            if missing:
                return [], AgentFailure(f"the response of AgentExecutor in {self._agent_file} has no {missing[0]!r}")
        if late:
            return responses, "deadline"
        return responses, None

    async def check_health(self) -> None:
        """Raises vLLM's EngineDeadError when the engine's process has died."""
        await self.llm.check_health()

    async def receive_weights(self, names, shapes, dtype) -> None:
        """CPU: receive all parameters in one broadcast (see ``cpu_platform.CpuWorkerExtension``)."""
        await self.llm.collective_rpc("receive_weights", args=(names, shapes, dtype))


class Float32EngineActor(EngineActor):
    """One for ``ext.fp32``."""

    DTYPE = "float32"
