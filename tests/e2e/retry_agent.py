"""An agent file of OpenRLHF (``--train.agent_func_path``): two turns of at most six tokens, and known rewards.

Nothing depends on what the policy says, so that tests can count on every group: of the rollouts of a prompt, every
other one is right, and where the label is a multiple of 3, all of them are.
"""

from __future__ import annotations

from collections import Counter

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TURN_TOKENS = 6
FEEDBACK = "\nagain:"


class ShortTurns:
    """The engine, with a limit of tokens for each turn. OpenRLHF lets a turn have all that is left."""

    def __init__(self, engine) -> None:
        self._engine = engine

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        sampling_params.max_tokens = min(sampling_params.max_tokens, TURN_TOKENS)
        return await self._engine.generate(prompt_token_ids, sampling_params, multi_modal_data=multi_modal_data)


class Retry(AgentInstanceBase):
    _num_rollouts: Counter[str] = Counter()

    def __init__(self, *args, **kwargs) -> None:
        self._turn = 0

    async def reset(self, states: dict, **kwargs) -> dict:
        label = states["label"]
        self._is_right = int(label) % 3 == 0 or self._num_rollouts[label] % 2 == 0
        self._num_rollouts[label] += 1  # even once a request is done, since those of the test are for even numbers
        return {"observation": states["observation"] + "try:"}

    async def step(self, states: dict, **kwargs) -> dict:
        self._turn += 1
        assert states["observation_text"].endswith("try:" if self._turn == 1 else FEEDBACK)
        is_done = self._turn == 2
        reward = torch.tensor(float(self._is_right) if is_done else 0.0)
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if is_done else FEEDBACK,
            "done": is_done,
            "extra_logs": {"turns": torch.tensor(float(self._turn))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(Retry)

    async def execute(self, *, llm_engine, **request) -> dict:
        return await super().execute(llm_engine=ShortTurns(llm_engine), **request)
