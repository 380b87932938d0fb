"""OpenRLHF's policy loss, watched: how many tokens of which origin the clip has cut off."""

from __future__ import annotations

from collections.abc import Callable

import torch

from openrlhf_ext.adapters.replayed_rows import ORIGINS
from openrlhf_ext.off_policy import clipped_tokens


class MeasuredLoss:
    """Calls OpenRLHF's loss unchanged and counts clipped tokens by the origin of their row.

    Every count is a share of *all* tokens of the micro-batch, so that means weighted by tokens add up over
    micro-batches and ranks; `ratios` divides them in the end.
    """

    def __init__(self, loss: Callable) -> None:
        self._loss = loss
        self._origin: torch.Tensor | None = None
        self._shares: dict[str, torch.Tensor] = {}

    def watch(self, origin: torch.Tensor) -> None:
        """Measure the next call; ``origin`` is (B,), each row's place in `ORIGINS`."""
        self._origin = origin

    def take(self) -> dict[str, torch.Tensor]:
        """The shares of the last watched call."""
        shares, self._shares = self._shares, {}
        return shares

    def __call__(self, log_probs, old_log_probs, advantages, action_mask, **options):
        if self._origin is not None:
            with torch.no_grad():
                self._shares = self._measure(log_probs, old_log_probs, advantages, action_mask.bool())
            self._origin = None
        return self._loss(log_probs, old_log_probs, advantages, action_mask=action_mask, **options)

    def _measure(self, log_probs, old_log_probs, advantages, mask) -> dict[str, torch.Tensor]:
        clipped = clipped_tokens(
            log_probs,
            old_log_probs,
            advantages,
            eps_low=self._loss.clip_eps_low,
            eps_high=self._loss.clip_eps_high,
        )
        num_tokens = mask.sum().clamp(min=1)
        shares = {}
        for i, origin in enumerate(ORIGINS):
            tokens = mask & (self._origin == i)[:, None]
            shares[f"{origin}_token_frac"] = tokens.sum() / num_tokens
            shares[f"{origin}_ratio_clipped_share"] = (clipped & tokens).sum() / num_tokens
        return shares


def ratios(status: dict[str, float]) -> dict[str, float]:
    """Take the shares out of a reduced status: ``fresh/ratio_clipped_frac``, ``fresh/token_frac`` and so on."""
    metrics = {}
    for origin in ORIGINS:
        tokens = status.pop(f"{origin}_token_frac", 0.0)
        clipped = status.pop(f"{origin}_ratio_clipped_share", 0.0)
        if tokens:
            metrics |= {f"{origin}/token_frac": tokens, f"{origin}/ratio_clipped_frac": clipped / tokens}
    return metrics
