"""Completion -> program -> verdict -> reward. Imports no torch."""

from engine.reward.grader import Grader
from engine.reward.parts import REWARD_PARTS, reward_of

__all__ = ["REWARD_PARTS", "Grader", "reward_of"]
