"""The trainer: one package for each stage of a step; `run.py` fits them together."""
