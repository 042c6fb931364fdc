"""The proof of a sync: a fixed text's log-probs, by the trainer and by the sampler, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import RunError


class CanaryError(RunError):
    """The sampler does not hold the trainer's weights; nothing sampled from it may be trained on."""


@dataclass(slots=True)
class Canary:
    """A text whose log-probs must agree between trainer and sampler after every sync, and change with the weights."""

    token_ids: tuple[int, ...]
    tolerance: float
    """Largest allowed difference of one token's log-prob, in nats."""
    _last: tuple[float, ...] | None = None

    def check(self, trainer: Sequence[float], sampler: Sequence[float], *, version: int, changed: bool) -> float:
        """Compare after the sync of `version`; `changed` says whether the weights are others than at the last check.

        Returns the largest difference. Raises CanaryError where it is above the tolerance, where a log-prob is no
        number, or where changed weights left every log-prob as it was to the last bit.
        """
        differences = [abs(t - s) for t, s in zip(trainer, sampler, strict=True)]
        worst = max(differences)
        if not all(d <= self.tolerance for d in differences):  # written so that NaN fails
            where = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
            raise CanaryError(
                f"after the sync of version {version} trainer and sampler differ by {differences[where]:.3g} nats at "
                f"canary token {where + 1} (sync.tolerance is {self.tolerance:g}): the sampler does not hold the "
                f"trainer's weights"
            )
        if changed and self._last is not None and tuple(sampler) == self._last:
            raise CanaryError(f"the sync of version {version} changed nothing in the sampler, though the weights moved")
        self._last = tuple(sampler)
        return worst
