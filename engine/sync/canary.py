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
    heard: tuple[float, ...] | None = None
    """What the sampler said at the last check."""
    version: int | None = None
    """Of the last check."""

    def check(self, trainer: Sequence[float], sampler: Sequence[float], *, version: int, changed: bool) -> float:
        """Compare after the sync of `version`; `changed` says whether it has other weights than the version before.

        A sampler that replaces another is checked once more at the same version, and must say what that one said. One
        that missed versions is only held against the trainer.

        Returns the largest difference. Raises CanaryError where it is above the tolerance, where a log-prob is no
        number, where changed weights left every log-prob as it was to the last bit, or where unchanged ones moved one
        beyond the tolerance.
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
        before = self.heard if self.version in (version - 1, version) else None
        changed = changed and self.version != version
        if changed and tuple(sampler) == before:
            raise CanaryError(f"the sync of version {version} changed nothing in the sampler, though the weights moved")
        if not changed and before is not None:
            moved = max(abs(now - then) for now, then in zip(sampler, before, strict=True))
            if not moved <= self.tolerance:
                raise CanaryError(
                    f"the sync of version {version} moved the canary by {moved:.3g} nats, though the weights are those "
                    f"of the last check (sync.tolerance is {self.tolerance:g})"
                )
        self.heard, self.version = tuple(sampler), version
        return worst
