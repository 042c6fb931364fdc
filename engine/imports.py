"""What heavy libraries find in the environment when they are imported, and how they are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

WAITING = {"OMP_WAIT_POLICY": "passive"}
"""For libgomp, which reads it when torch is imported: threads that wait sleep, for processes share the cores."""
TURNS = {"GOMP_SPINCOUNT": "20000"}
"""Where trainer and sampler take turns, a thread may spin a moment before it sleeps: each of a forward's hundreds of
products wakes its threads anew otherwise, a tenth of a quickstart's step. Where they run at once, it costs more."""


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage is looked for meanwhile: that takes a fifth of the time of heavy imports and finds nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
