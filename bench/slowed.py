"""`rlvr run` with delays: what `bench/plan.py` predicts, so that two cores can stand for many devices.

`python bench/slowed.py GRADE_SECONDS RECIPE OPTION...` is `rlvr run RECIPE OPTION...`, and all in it is real: vLLM, the
jails, the trainer. Beside that an engine step sleeps STEP_SECONDS and SEQUENCE_SECONDS for each sequence, a program
GRADE_SECONDS, of which GRADERS sleep at once, and an optimizer step TRAIN_SECONDS.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

STEP_SECONDS, SEQUENCE_SECONDS = 0.02, 0.008
TRAIN_SECONDS = 0.8
GRADERS = 2
WORKER = "--worker"


def slow_sampler(descriptor: str) -> None:
    """The sampler's process, in the place of `python -m engine.rollout.worker`."""
    from engine.imports import without_collector
    from engine.rollout import worker

    with without_collector():
        from engine.rollout.vllm_engine import VllmEngine
    step = VllmEngine.step

    def slowed(self: VllmEngine) -> Any:
        landed = step(self)
        sequences = self.book.sampling + len(landed)
        time.sleep(STEP_SECONDS + SEQUENCE_SECONDS * sequences if sequences else 0.0)
        return landed

    VllmEngine.step = slowed  # type: ignore[method-assign]
    sys.argv = [sys.argv[0], descriptor]
    worker.main()


def slow_run(grade_seconds: float, options: list[str]) -> None:
    """The trainer's process."""
    from engine.cli import main
    from engine.reward.grader import Grader
    from engine.train.step import Trainer

    grade, step = Grader._grade, Trainer.step
    places = asyncio.Semaphore(GRADERS)

    async def slowed(self: Grader, *arguments: Any) -> Any:
        async with places:
            graded = await grade(self, *arguments)
            await asyncio.sleep(grade_seconds)
            return graded

    def trained(self: Trainer, *arguments: Any) -> Any:
        stats = step(self, *arguments)
        time.sleep(TRAIN_SECONDS)
        return stats

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *rest: Any, **keys: Any) -> None:
            if isinstance(args, list) and "engine.rollout.worker" in args:
                args = [sys.executable, __file__, WORKER, args[-1]]
            super().__init__(args, *rest, **keys)

    Grader._grade = slowed  # type: ignore[assignment]
    Trainer.step = trained  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[misc]
    sys.argv = ["rlvr", "run", *options]
    main()


if __name__ == "__main__":
    if sys.argv[1] == WORKER:
        slow_sampler(sys.argv[2])
    else:
        slow_run(float(sys.argv[1]), sys.argv[2:])
