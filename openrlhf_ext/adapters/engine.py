"""The vLLM engine actor: OpenRLHF's, plus whole groups per call, a deadline, and killable rewards."""

from __future__ import annotations

import asyncio
import logging
import os

import ray
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from openrlhf.utils import get_tokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.adapters.upstream import plain
from openrlhf_ext.config import RewardConfig
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, check_reward

logger = logging.getLogger(__name__)

# Key in a response's ``extra_logs`` that carries why its reward is unusable to the controller.
FAILURE_KEY = "_reward_failure"


class EngineActor(plain(RolloutRayActor)):
    """One vLLM engine in a Ray actor."""

    async def __init__(self, *args, **kwargs) -> None:
        if cpu_platform.active():
            # vLLM replaces the in-process executor by one more process when this is on; with one OpenMP thread
            # per process there is nothing to bind, and the process costs its imports and a hop per token.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            kwargs["worker_extension_cls"] = cpu_platform.WORKER_EXTENSION
            kwargs["enable_sleep_mode"] = False  # refused on CPU; going to sleep is then ignored
        await super().__init__(*args, **kwargs)

    def configure(self, strategy, reward: RewardConfig) -> None:
        """Load the tokenizer once (upstream pickles it into every call) and put the reward file behind a deadline."""
        self._tokenizer = get_tokenizer(
            self.kwargs["model"], None, "left", strategy, use_fast=not strategy.args.data.disable_fast_tokenizer
        )
        if getattr(self.executor, "reward_func", None) is not None and reward.deadline_s > 0:
            path = self.executor.reward_endpoints[0]
            self._pool = RewardPool(path, deadline_s=reward.deadline_s, workers=reward.workers)
            self.executor.reward_func = self._guarded_reward

    def _guarded_reward(self, queries, prompts, labels) -> dict:
        """Upstream's reward_func, run in a process that is killed at the deadline. Called from worker threads."""
        values = check_reward(self._pool(queries, prompts, labels), self._pool.path)
        if isinstance(values, RewardFailure):
            return {"rewards": None, "scores": None, "extra_logs": {FAILURE_KEY: (values.kind, values.detail)}}
        return {"rewards": values.reward, "scores": values.score, "extra_logs": values.extra}

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

        Returns the finished responses and None, or those that finished and why the others did not. Requests still
        running at the deadline are aborted in the engine. When the engine's process has died, so does this actor: all
        its callers then see the same, a dead engine.
        """
        params = [
            SamplingParams(
                **sampling, output_kind=RequestOutputKind.FINAL_ONLY, seed=None if seed is None else seed + i
            )
            for i in range(num_rollouts)
        ]
        tasks = [
            asyncio.ensure_future(
                self.executor.execute(
                    prompt=prompt,
                    label=label,
                    sampling_params=own,
                    max_length=max_length,
                    hf_tokenizer=self._tokenizer,
                    llm_engine=self,
                    images=images,
                )
            )
            for own in params
        ]
        done, late = await asyncio.wait(tasks, timeout=deadline_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        errors = [task.exception() for task in done if task.exception() is not None]
        responses = [task.result() for task in tasks if task in done and task.exception() is None]
        if any(isinstance(error, EngineDeadError) for error in errors):
            ray.actor.exit_actor()
        if errors:
            return responses, f"{type(errors[0]).__name__}: {errors[0]}"
        if late:
            return responses, "deadline"
        return responses, None

    async def check_health(self) -> None:
        """Raises vLLM's EngineDeadError when the engine's process has died."""
        await self.llm.check_health()

    async def receive_weights(self, names, shapes, dtype) -> None:
        """CPU: receive all parameters in one broadcast (see ``cpu_platform.CpuWorkerExtension``)."""
        await self.llm.collective_rpc("receive_weights", args=(names, shapes, dtype))
