"""How far rounding alone moves a large step's gradient: `python bench/rounding.py --json OUT`.

Two pairs of completions of bench/train_step.py's step with 512-token prompts: a steep one, whose gradient is ten times
an ordinary one's, and an ordinary one. Of each, relative L2 distances from the gradient in float64:

* `float64 moved`: float64 again, the frozen weights moved by about a unit of fp32's last place (`move_frozen`), which
  is what no computation on fp32 weights can tell apart;
* `plain fp32` and `ours fp32`: the plain model and our trainer in fp32, over weights moved likewise, each time
  otherwise: as many roundings of one and the same calculation. A single one says little, see `min` and `max`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.plain_gradient import Work, make_work, plain_gradient  # noqa: E402
from bench.report import Row, Target, print_rows, publish, ratio, rows_of, target  # noqa: E402
from bench.train_step import COMPLETION, PROMPTS, UNCLIPPED, our_gradient, recipe_of, resolve_model  # noqa: E402

PAIRS = {"steep": (0, (6, 0)), "ordinary": (1, (0, 1))}
"""The group, and the two of its completions; the first is rewarded."""
UNIT = {"error": "relative L2"}


def pair_of(work: Work, group: int, members: tuple[int, int]) -> Work:
    """Two completions of a group as a step of their own."""
    return Work([work.prompts[group]], [[work.completions[group][m] for m in members]], [[1.0, 0.0]])


def distances(case: str, work: Work, draws: int, model_dir: Path) -> list[Row]:
    """One pair's rows."""
    recipe = recipe_of(work, "float32", UNCLIPPED)
    lora = recipe.lora
    assert lora is not None  # the quickstart's
    want = plain_gradient(work, model_dir, lora, torch.float64)

    def error(got: torch.Tensor) -> dict[str, float]:
        return {"error": float((got - want).norm() / want.norm())}

    moved = [error(plain_gradient(work, model_dir, lora, torch.float64, seed)) for seed in range(2)]
    plain = [error(plain_gradient(work, model_dir, lora, torch.float32, seed)) for seed in range(draws)]
    ours = [error(our_gradient(work, recipe, model_dir, seed)) for seed in range(draws)]
    named = {"float64 moved": moved, "plain fp32": plain, "ours fp32": ours}
    return [row for impl, answers in named.items() for row in rows_of(case, impl, UNIT, answers)]


def targets(rows: list[Row]) -> list[Target]:
    """Ours must be no farther from float64 than the plain model, by the median of the draws."""
    medians = {(row.case, row.impl): row.median for row in rows}
    made: list[Target] = []
    for case in PAIRS:
        share = ratio(medians.get((case, "ours fp32")), medians.get((case, "plain fp32")))
        made += target(f"{case}: error over the plain model's", share, 1.25, "lower")
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--draws", type=int, default=12, help="roundings of each fp32 implementation")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model_dir = resolve_model()
    step = make_work(model_dir, PROMPTS["prompts_512"], 8, 8, COMPLETION)
    rows: list[Row] = []
    for case, (group, members) in PAIRS.items():
        rows += distances(case, pair_of(step, group, members), options.draws, model_dir)
        print_rows(rows[-3:])
    publish("bench/rounding.py", rows, targets(rows), (), options.json)


if __name__ == "__main__":
    main()
