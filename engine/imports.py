"""What heavy libraries find in the environment when they are imported, and how they are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000"}
"""For libgomp, which reads it when torch is imported: a thread without work spins for a while, then sleeps.

Trainer and sampler share the cores, so not for long; but with no spinning at all each of the hundreds of products
of a forward wakes its threads anew: a step of the quickstart takes a tenth longer.
"""


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage is looked for meanwhile: that takes a fifth of the time of heavy imports and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
