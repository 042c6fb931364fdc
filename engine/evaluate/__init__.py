"""Figures over held-out tasks: pass rates, intervals, comparison."""

from engine.evaluate.bootstrap import interval, paired_bootstrap
from engine.evaluate.results import Protocol, Results, differing, read_answers, read_protocol
from engine.evaluate.suite import answer_of, pass_at_k, suite_result

__all__ = [
    "Protocol",
    "Results",
    "answer_of",
    "differing",
    "interval",
    "paired_bootstrap",
    "pass_at_k",
    "read_answers",
    "read_protocol",
    "suite_result",
]
