"""The controller's side of generation: requests to engines, responses to rollouts.

Implements ``sampling.RolloutEngine`` over the engine actors. Results come back in request order whatever the order of
completion; a request that is late, fails or has an unusable reward becomes a ``FailedRequest`` with a reason; an
engine that dies is left out, and only when none is left the run stops.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError

from openrlhf_ext.adapters.engine import FAILURE_KEY, AgentFailure
from openrlhf_ext.adapters.upstream import first_line
from openrlhf_ext.config import ExtConfig
from openrlhf_ext.rewards.result import RewardFailure, RewardValues, check_reward
from openrlhf_ext.types import FailedRequest, Rollout, RolloutGroup, RolloutRequest

logger = logging.getLogger(__name__)

# A healthy engine answers at its own deadline; only a dead or stuck one needs the controller's.
_GRACE_S = 30.0
_HEALTH_S = 60.0

Result = RolloutGroup[Experience] | FailedRequest


class EnginePool:
    """The engine actors that are still alive, with sleep and wake-up around a batch of requests."""

    def __init__(self, engines: Sequence, *, sleeps: bool) -> None:
        self.engines = list(engines)
        self._names = {engine: f"vLLM engine {i} of {len(self.engines)}" for i, engine in enumerate(self.engines)}
        self._sleeps = sleeps

    def all(self, method: str, *args) -> list:
        """Call a method on every engine and wait."""
        return ray.get([getattr(engine, method).remote(*args) for engine in self.engines])

    def leave_out_the_dead(self) -> None:
        """Ask every engine for its health. Raises RuntimeError when none is left.

        One that gives no answer is as good as dead: code of an agent or a model that blocks its event loop for ever
        would otherwise hold the run up for ever, too.
        """
        for engine, ref in [(engine, engine.check_health.remote()) for engine in self.engines]:
            try:
                ray.get(ref, timeout=_HEALTH_S)
            except RayError as error:
                self.lost(engine, error)

    def wake(self) -> None:
        if self._sleeps:
            self.all("wake_up")

    def sleep(self) -> None:
        if self._sleeps:
            self.all("sleep")

    def lost(self, engine, error: Exception) -> None:
        """Leave out a dead engine. Raises RuntimeError when it was the last one."""
        if engine in self.engines:
            self.engines.remove(engine)
            how = "does not answer" if isinstance(error, GetTimeoutError) else "died"
            logger.error("%s %s and is left out (%d remain)", self._names[engine], how, len(self.engines))
        if not self.engines and isinstance(error, GetTimeoutError):
            raise RuntimeError(
                f"no vLLM engine is left: {self._names[engine]}, the last one, does not answer any more; most often "
                "an agent file blocks it (hand what takes long to asyncio.to_thread); see the logs of the workers"
            ) from None
        if not self.engines:
            raise RuntimeError(
                f"no vLLM engine is left: {self._names[engine]} died as the last one, most often for want of memory; "
                f"see the logs of the workers ({first_line(error)})"
            ) from None


class GroupGenerator:
    """Generates groups at one temperature. ``policy_version`` stamps them.

    Args:
        stream: sets its seeds apart from those of another generator (``ext.rollout.seed_requests``).
    """

    def __init__(
        self,
        pool: EnginePool,
        args,
        ext: ExtConfig,
        *,
        temperature: float,
        stream: str = "train",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.policy_version = 0
        self._seeds = _RequestSeeds(args.train.seed, stream) if ext.rollout.seed_requests else None
        self._num_reward_timeouts = 0
        self._busy_s = self._available_s = 0.0
        self._pool = pool
        self._ext = ext
        self._on_progress = on_progress
        self._max_length = args.data.max_len
        self._reward_source = args.train.agent_func_path or args.reward.remote_url[0]
        self.collects_log_probs = ext.rollout.log_probs or args.algo.advantage.is_correction_level != "off"
        self._sampling = {
            "temperature": temperature,
            "top_p": args.rollout.top_p,
            "max_tokens": args.rollout.max_new_tokens,
            # Upstream's 1 forbids an end of text as the first token; the trainer's policy does not, and the two would
            # drift apart wherever that token is likely. A response of that token alone has one token.
            "min_tokens": 0,
            "skip_special_tokens": False,
            "logprobs": 1 if self.collects_log_probs else None,
        }

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: answers that made the verifier hang or crash, and how busy the engines were.

        An engine is busy while it has a request; the share is over all engines and the time of the ``generate`` calls.
        """
        timeouts, self._num_reward_timeouts = self._num_reward_timeouts, 0
        busy, available = self._busy_s, self._available_s
        self._busy_s = self._available_s = 0.0
        metrics = {"step/num_reward_timeouts": timeouts}
        return metrics | ({"rollout/engine_busy_frac": busy / available} if available else {})

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Result]:
        """One result for each request, in order. Raises RuntimeError when no engine is left."""
        if not requests:
            return []
        self._pool.wake()
        try:
            return self._collect(requests, self._dispatch(requests))
        finally:
            self._pool.sleep()

    def _dispatch(self, requests: Sequence[RolloutRequest]) -> dict:
        """Send every request to the engine with the least work so far."""
        load = {engine: 0 for engine in self._pool.engines}
        refs = {}
        for slot, request in enumerate(requests):
            engine = min(load, key=lambda e: load[e])
            load[engine] += request.num_rollouts
            ref = engine.generate_group.remote(
                prompt=request.prompt.text,
                label=request.prompt.label,
                images=request.prompt.images,
                sampling=self._sampling,
                max_length=self._max_length,
                num_rollouts=request.num_rollouts,
                deadline_s=self._ext.rollout.deadline_s,
                seed=self._seeds.next(self.policy_version) if self._seeds else None,
            )
            refs[ref] = (slot, request, engine)
        return refs

    def _collect(self, requests: Sequence[RolloutRequest], refs: dict) -> list[Result]:
        results: list[Result | None] = [None] * len(requests)
        started = time.monotonic()
        give_up = started + self._ext.rollout.deadline_s + _GRACE_S
        waiting = list(refs)
        last_answer = {engine: started for engine in self._pool.engines}
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, min(10.0, give_up - time.monotonic())))
            for ref in ready:
                slot, request, engine = refs[ref]
                last_answer[engine] = time.monotonic()
                results[slot] = self._result(ref, request, engine)
                self._on_progress(len(requests) - len(waiting), len(requests))
            if time.monotonic() > give_up:
                break
        self._busy_s += sum(answer - started for answer in last_answer.values())
        self._available_s += (time.monotonic() - started) * len(last_answer)
        for ref in waiting:
            slot, request, _ = refs[ref]
            ray.cancel(ref, force=False)
            results[slot] = _failed(request, "deadline", "the engine did not answer after its own deadline", [])
        if waiting:
            self._pool.leave_out_the_dead()
        return results  # type: ignore[return-value]

    def _result(self, ref, request: RolloutRequest, engine) -> Result:
        try:
            responses, problem = ray.get(ref)
        except (RayActorError, OutOfMemoryError) as error:  # Ray's memory monitor has killed it
            self._pool.lost(engine, error)
            return _failed(request, "engine_error", f"engine died: {first_line(error)}", [])
        except RayError as error:
            return _failed(request, "engine_error", first_line(getattr(error, "cause", None) or error), [])
        if problem == "deadline":
            detail = f"{request.num_rollouts - len(responses)} of {request.num_rollouts} rollouts unfinished"
            return _failed(request, "deadline", f"{detail} after {self._ext.rollout.deadline_s:g} s", responses)
        if isinstance(problem, AgentFailure):
            return _failed(request, "invalid_reward", problem, responses)  # environments may fail for a moment
        if problem is not None:
            return _failed(request, "engine_error", problem, responses)
        rollouts = []
        for response in responses:
            rollout = self._rollout(response)
            if not isinstance(rollout, Rollout):
                reason, detail = rollout
                return _failed(request, reason, detail, responses, retryable=reason == "engine_error")
            rollouts.append(rollout)
        return RolloutGroup(request.group_id, request.prompt, tuple(rollouts), self.policy_version)

    def _rollout(self, response: dict) -> Rollout[Experience] | tuple[str, str]:
        """A rollout with a checked reward, or the reason and detail why there is none."""
        values = self._reward(response)
        if isinstance(values, str):
            return "invalid_reward", values
        response |= {"reward": values.reward, "scores": values.score, "extra_logs": values.extra}
        if self.collects_log_probs and not _log_probs_fit(response):
            return "engine_error", "no finite log-probability for every token"
        experience = SamplesGenerator._process_response_into_experience(None, response, max_len=self._max_length)
        num_tokens = int(experience.action_mask.sum())
        if num_tokens == 0:
            return "empty_response", f"no response token fits into --data.max_len {self._max_length}"
        # float32 here, so that the reward tensor's values and the header's are the same numbers.
        reward = float(torch.tensor(values.reward, dtype=torch.float32))
        return Rollout(reward=reward, accuracy=values.score, num_tokens=num_tokens, payload=experience)

    def _reward(self, response: dict) -> RewardValues | str:
        extra = response.get("extra_logs") or {}
        failure = extra.pop(FAILURE_KEY, None) if isinstance(extra, dict) else None
        if failure is not None and failure[0] in ("deadline", "died"):
            # The answer made the verifier hang or crash: a wrong answer, not a broken verifier.
            self._num_reward_timeouts += 1
            return RewardValues(reward=0.0, score=0.0, extra={})
        if failure is not None:
            problem = f"reward function failed ({failure[0]}): {failure[1]}"
        else:
            result = {"rewards": response["reward"], "scores": response.get("scores"), "extra_logs": extra}
            checked = check_reward(result, self._reward_source)
            if not isinstance(checked, RewardFailure):
                return checked
            problem = checked.detail
        if self._ext.reward.on_invalid == "zero":
            logger.warning("invalid reward counted as 0: %s", problem)
            return RewardValues(reward=0.0, score=0.0, extra={})
        return problem


class _RequestSeeds:
    """A seed for each request: of the run, the policy version and how many requests that version had before.

    Nothing has to be stored to go on after a checkpoint, and no request of a version gets the seed of another, whether
    it is a pilot, a commit or a retry.
    """

    def __init__(self, seed: int, stream: str) -> None:
        self._run = f"{seed}/{stream}"
        self._version, self._count = -1, 0

    def next(self, version: int) -> int:
        if version != self._version:
            self._version, self._count = version, 0
        self._count += 1
        digest = hashlib.sha256(f"{self._run}/{version}/{self._count}".encode()).digest()
        return int.from_bytes(digest[:4], "big") << 16  # the rollouts of a group take the numbers that follow


def _log_probs_fit(response: dict) -> bool:
    log_probs = response["rollout_log_probs"]
    return (
        log_probs is not None
        and len(log_probs) == len(response["observation_tokens"])
        and all(math.isfinite(x) for x in log_probs)
    )


def _failed(
    request: RolloutRequest, reason: str, detail: str, responses: Sequence[dict], *, retryable: bool = True
) -> FailedRequest:
    tokens = sum(end - start for response in responses for start, end in response["action_ranges"])
    return FailedRequest(request, reason, detail, len(responses), tokens, retryable)


def unify_info(experiences: Sequence[Experience]) -> None:
    """Give all rows the same ``info`` keys in the same order, 0.0 where one had none.

    OpenRLHF takes the key set of the first row and reduces metrics over ranks by position, so rows with other keys
    raise, vanish or shift numbers between metrics.
    """
    zeros = {key: torch.zeros_like(value, dtype=torch.float) for one in experiences for key, value in one.info.items()}
    for experience in experiences:
        experience.info = {key: experience.info.get(key, zeros[key]).float() for key in sorted(zeros)}
