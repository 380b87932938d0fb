"""Which of the prompts that could be drawn are worth it: the interface of a selector, and MoPPS.

A selector sees more candidates than are needed, keeps some, and learns from their fresh rollouts. Candidates that are
not chosen cost nothing and return with the next epoch of the pool, so that every batch of candidates is a new random
one, as in the paper; an epoch of the pool is then a pass of all prompts as candidates.

MoPPS (arXiv 2507.04632) keeps a Beta posterior of every prompt's accuracy, draws once from each candidate's, and takes
those nearest to a target. The posterior forgets a share of what it knew at every visit, since the policy changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from openrlhf_ext.config import MoppsConfig
from openrlhf_ext.prompt_pool import PromptPool
from openrlhf_ext.types import P, Prompt, RolloutGroup


class Selector(Protocol):
    """Chooses prompts, by index. A new rule is one class with these five."""

    def num_candidates(self, k: int) -> int:
        """Candidates wanted for a choice of `k`."""
        ...

    def choose(self, candidates: Sequence[int], k: int) -> list[int]:
        """`k` of the candidates, or all where there are fewer, in the order given."""
        ...

    def observe(self, index: int, num_correct: int, num_rollouts: int) -> None:
        """One visit of a prompt: its fresh rollouts, never replayed ones."""
        ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


class Mopps:
    """Beta posterior with decay, Thompson draw, nearest to the target."""

    def __init__(self, num_prompts: int, seed: int, config: MoppsConfig) -> None:
        self._config = config
        self._alpha, self._beta = np.ones(num_prompts), np.ones(num_prompts)
        # Three numbers, the last not zero: no stream of the pool's, which are of (seed, epoch).
        self._rng = np.random.default_rng([seed, 0, 1])

    def num_candidates(self, k: int) -> int:
        return self._config.candidates * k

    def choose(self, candidates: Sequence[int], k: int) -> list[int]:
        index = np.array(candidates, np.int64)
        distance = np.abs(self._rng.beta(self._alpha[index], self._beta[index]) - self._config.target)
        return index[np.sort(np.argsort(distance, kind="stable")[:k])].tolist()

    def observe(self, index: int, num_correct: int, num_rollouts: int) -> None:
        """Beta(a, b) becomes Beta(d a + (1 - d) + correct, d b + (1 - d) + wrong) with decay d and prior (1, 1)."""
        decay = self._config.decay
        self._alpha[index] = decay * self._alpha[index] + (1 - decay) + num_correct
        self._beta[index] = decay * self._beta[index] + (1 - decay) + num_rollouts - num_correct

    def state_dict(self) -> dict[str, object]:
        """JSON-able and exact."""
        known = np.flatnonzero((self._alpha != 1) | (self._beta != 1))
        return {
            "num_prompts": len(self._alpha),
            "index": known.tolist(),
            "alpha": self._alpha[known].tolist(),
            "beta": self._beta[known].tolist(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Raises ValueError if the state belongs to other data."""
        if state["num_prompts"] != len(self._alpha):
            raise ValueError(
                f"the checkpoint was made with num_prompts {state['num_prompts']}, this run has {len(self._alpha)}; "
                "resume with the same --data.prompt_dataset, or start in a new --ext.run_dir"
            )
        index = np.array(state["index"], np.int64)
        for values, name in ((self._alpha, "alpha"), (self._beta, "beta")):
            values[:] = 1
            values[index] = state[name]
        self._rng.bit_generator.state = state["rng"]


class PromptSource:
    """Prompts for a sampler: from the pool, through the selector if there is one, none twice in a train step.

    ``start_step``, then ``take`` or ``next_prompts`` once for every round, then ``observe``.
    """

    def __init__(self, prompts: Sequence[Prompt], pool: PromptPool, selector: Selector | None = None) -> None:
        self.prompts, self.pool, self.selector = prompts, pool, selector
        self.seen: set[int] = set()
        """Prompts of this train step."""
        self._index_of = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}

    def start_step(self) -> None:
        self.seen.clear()

    def take(self, k: int, *, waiting: Collection[int] = ()) -> list[int]:
        """Indices of `k` prompts that are neither of this train step nor waiting, or fewer where there are no more.

        Raises PoolExhausted; see `PromptPool.take`.
        """
        chosen = self._draw(self.selector.num_candidates(k) if self.selector else k, {*self.seen, *waiting})
        if self.selector is not None:
            candidates, chosen = chosen, self.selector.choose(chosen, k)
            self.pool.put_off(set(candidates).difference(chosen))
        self.seen.update(chosen)
        return chosen

    def _draw(self, k: int, in_use: set[int]) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < k and (more := self.pool.take(k - len(drawn), pass_over=in_use.union(drawn))):
            drawn += more
        return drawn

    def next_prompts(self, k: int) -> list[Prompt]:
        """The next `k` prompts. Without a selector they just follow each other, as OpenRLHF's do."""
        if self.selector is not None:
            return [self.prompts[index] for index in self.take(k)]
        indices: list[int] = []
        while len(indices) < k:
            indices += self.pool.take(k - len(indices))
        return [self.prompts[index] for index in indices]

    def observe(self, groups: Iterable[RolloutGroup[P]]) -> None:
        """Tell the selector about the first fresh rollouts of every prompt of a step."""
        if self.selector is not None:
            for group in groups:
                index = self._index_of[group.prompt.prompt_id]
                self.selector.observe(index, num_correct(group), len(group.rollouts))


def num_correct(group: RolloutGroup[P]) -> int:
    """Rollouts of accuracy 1 or more; what scores in between is not correct."""
    return sum(accuracy >= 1.0 for accuracy in group.accuracies())
