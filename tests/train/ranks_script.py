"""One of two trainers: `python -m tests.train.ranks_script RANK ADDRESS MODEL OUT`; rank 0 writes what it found."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from engine.train.ranks import Ranks
from engine.train.step import Trainer
from tests.train.test_ranks import CASES, data_of, recipe_of, stir


def main(rank: int, address: str, model: Path, out: Path) -> None:
    """Every case with the same two processes, a fresh trainer for each."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, 2, address)
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
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
