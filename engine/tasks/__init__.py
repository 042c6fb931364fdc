"""What is learnt: tasks from a source, and the order in which a run takes them."""

from engine.tasks.curriculum import Curriculum
from engine.tasks.sources import load_tasks

__all__ = ["Curriculum", "load_tasks"]
