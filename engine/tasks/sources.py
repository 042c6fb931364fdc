"""From a recipe's source string to tasks."""

from __future__ import annotations

from engine.errors import InputError
from engine.tasks.generated import SPLITS, generated
from engine.types import Task


def load_tasks(source: str) -> list[Task]:
    """The tasks that `source` names: `generated:<split>`.

    Raises InputError for an unknown source; the message lists the known ones.
    """
    kind, _, rest = source.partition(":")
    if kind != "generated":
        known = ", ".join(f"generated:{split}" for split in SPLITS)
        raise InputError(f"tasks source {source!r} is unknown; known: {known}")
    return generated(rest)
