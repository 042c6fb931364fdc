"""Figures over held-out tasks: pass rates, intervals, comparison."""

from engine.evaluate.bootstrap import paired_bootstrap
from engine.evaluate.suite import suite_result

__all__ = ["paired_bootstrap", "suite_result"]
