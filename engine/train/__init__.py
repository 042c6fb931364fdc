"""Graded completions in, an optimizer step on the LoRA factors out."""

from engine.train.step import Trainer

__all__ = ["Trainer"]
