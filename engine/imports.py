"""Heavy imports without the collector, which takes a fifth of their time and finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage is looked for meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
