"""What is learnt: tasks from a source, and the order in which a run takes them."""

from engine.tasks.curriculum import Curriculum
from engine.tasks.sources import Loaded, load_tasks, read_tasks, to_download

__all__ = ["Curriculum", "Loaded", "load_tasks", "read_tasks", "to_download"]
