"""One of two trainers, under torchrun's environment: `python -m tests.train.ranks_script MODEL OUT`; rank 0 writes."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from engine.train.ranks import Ranks
from engine.train.step import Trainer
from tests.train.test_ranks import CASES, data_of, recipe_of, stir


def main(model: Path, out: Path) -> None:
    """Every case with the same two processes, a fresh trainer for each."""
    torch.set_num_threads(1)
    ranks = Ranks(int(os.environ["RANK"]), 2)
    found = {}
    for name in CASES:
        trainer = Trainer(recipe_of(name), model, ranks)
        stir(trainer)
        if not ranks.leads:
            ranks.follow(trainer)
            continue
        data = data_of(name)
        score = trainer.score(tuple(range(1, 9)))
        stats = [trainer.step(data, trainer.advantages(data), 1)]
        gradients = [None if p.grad is None else p.grad.clone() for p in trainer.policy.trained.parameters]
        stats.append(trainer.step(data, trainer.advantages(data), 2))
        found[name] = {
            "gradients": gradients,
            "parameters": [p.detach() for p in trainer.policy.trained.parameters],
            "stats": [asdict(one) for one in stats],
            "score": score,
            "state": trainer.state(),
        }
        ranks.tell("end")
    if ranks.leads:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
