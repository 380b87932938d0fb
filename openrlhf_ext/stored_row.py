"""A trained rollout in compact arrays: what a replay buffer keeps of it.

Nothing is shared with its source. Later changes by OpenRLHF (it overwrites rewards, indices and log-probabilities in
place) cannot reach a stored row, and a stored row does not keep a block of Ray's object store alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

Multimodal = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One rollout of T tokens (prompt and response), A of them sampled by the policy: 5 T + 4 A bytes.

    float32 log-probabilities: bfloat16 would cost up to one percent of an importance ratio.
    """

    tokens: np.ndarray
    """(T,) int32."""
    action_mask: np.ndarray
    """(T - 1,) bool: entry t says whether token t + 1 was sampled by the policy."""
    behavior_log_probs: np.ndarray
    """(A,) float32: of the sampled tokens, under the policy that sampled them, by the training engine."""
    engine_gap: np.ndarray | None
    """(A,) float16: the above minus the rollout engine's own; only where the mismatch between them is corrected."""
    truncated: bool
    info: Mapping[str, float]
    """Numbers for the log, by name."""
    multimodal: Multimodal | None
    """The processor's tensors for the prompt's images; one object for all rows of a group."""

    @classmethod
    def copy_of(
        cls,
        tokens: torch.Tensor,
        action_mask: torch.Tensor,
        log_probs: torch.Tensor,
        *,
        engine_log_probs: torch.Tensor | None,
        truncated: bool,
        info: Mapping[str, float],
        multimodal: Multimodal | None,
    ) -> StoredRow:
        """Copies of the tensors (``multimodal`` is taken as it is; see `copy_multimodal`).

        Args:
            tokens: (T,) token ids.
            action_mask: (T - 1,) true where the next token was sampled.
            log_probs: (T - 1,) by the training engine at birth.
            engine_log_probs: (T - 1,) by the rollout engine, or None when not needed.

        Raises:
            ValueError: no token was sampled, or a log-probability is missing or not finite: no weight could ever be
                computed from it.
        """
        # NumPy: PyTorch takes five times as long to index by a mask.
        mask = action_mask.numpy().astype(bool)
        if log_probs is None or tuple(log_probs.shape) != mask.shape or not mask.any():
            shape = None if log_probs is None else tuple(log_probs.shape)
            raise ValueError(
                f"a row of {len(tokens)} tokens, {int(mask.sum())} of them sampled, has log-probabilities of shape "
                f"{shape}; a replay buffer needs one for each sampled token"
            )
        behavior = log_probs.float().numpy()[mask]
        if not np.isfinite(behavior).all():
            raise ValueError("a log-probability is not finite; such a row cannot be replayed")
        gap = None
        if engine_log_probs is not None:
            gap = (behavior - engine_log_probs.float().numpy()[mask]).astype(np.float16)
        return cls(
            tokens=tokens.numpy().astype(np.int32),
            action_mask=mask,
            behavior_log_probs=behavior,
            engine_gap=gap,
            truncated=truncated,
            info=dict(info),
            multimodal=multimodal,
        )

    def on_actions(self, values: np.ndarray) -> torch.Tensor:
        """(A,) values of the sampled tokens to (T - 1,) float32, zero elsewhere."""
        full = np.zeros(len(self.action_mask), np.float32)
        full[self.action_mask] = values
        return torch.from_numpy(full)


def copy_multimodal(inputs: list[Multimodal | None]) -> list[Multimodal | None]:
    """Copies of the image tensors of a group's rows; equal ones are stored once and shared.

    All rollouts of a prompt see the same images, and pixel values outweigh tokens by far.
    """
    copies: list[Multimodal | None] = []
    for one in inputs:
        same = next((copy for copy in copies if copy is not None and one is not None and _equal(one, copy)), None)
        copies.append(None if one is None else same or {k: torch.as_tensor(v).clone() for k, v in one.items()})
    return copies


def _equal(one: Multimodal, other: Multimodal) -> bool:
    return one.keys() == other.keys() and all(torch.equal(torch.as_tensor(one[key]), other[key]) for key in one)


def num_bytes(rows: Iterable[StoredRow]) -> int:
    """Bytes of the arrays of some rows, shared image tensors counted once."""
    total = 0
    images: dict[int, int] = {}
    for row in rows:
        total += row.tokens.nbytes + row.action_mask.nbytes + row.behavior_log_probs.nbytes
        total += 0 if row.engine_gap is None else row.engine_gap.nbytes
        for tensor in (row.multimodal or {}).values():
            images[id(tensor)] = tensor.nbytes
    return total + sum(images.values())
