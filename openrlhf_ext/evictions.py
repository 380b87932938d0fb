"""Why things left a buffer, counted, and the proof that none left uncounted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class EvictionCounter:
    """Counts what a buffer takes in and lets go.

    Args:
        name: of the buffer, for the message of an imbalance.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_pushed = 0
        self._evicted: Counter[str] = Counter()

    def pushed(self, count: int) -> None:
        self._num_pushed += count

    def evicted(self, reason: str, count: int) -> None:
        self._evicted[reason] += count

    def take(self, num_stored: int) -> Counter[str]:
        """Evictions since the last call, by reason.

        Raises RuntimeError unless everything ever pushed is stored or was evicted for a counted reason.
        """
        if self._num_pushed != num_stored + sum(self._evicted.values()):
            raise RuntimeError(
                f"{self._name} does not balance: {self._num_pushed} pushed, {num_stored} stored, evicted "
                f"{dict(self._evicted)}; this is a bug in openrlhf_ext, please report it with this line"
            )
        evicted, self._evicted = self._evicted, Counter()
        self._num_pushed = num_stored
        return evicted

    def state_dict(self) -> dict[str, object]:
        return {"num_pushed": self._num_pushed, "evicted": dict(self._evicted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_pushed, self._evicted = state["num_pushed"], Counter(state["evicted"])
