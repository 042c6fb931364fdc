"""What a run would be on other machines: a discrete-event simulation with measured or assumed phase times."""

from engine.plan.report import plan_lines

__all__ = ["plan_lines"]
