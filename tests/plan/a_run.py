"""A run's folder as a run would have left it, made by the simulation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from engine import recipe_file
from engine.plan.simulate import Phases, Setup, simulate

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
OVERRIDES = ("rollout.group_size=4", "rollout.prompts_per_step=3", "rollout.max_tokens=64")
LENGTHS = tuple(tuple(5 + (7 * g + 11 * m * m) % 59 for m in range(4)) for g in range(30))
PHASES = Phases(
    decode_seconds=0.02, decode_sequence_seconds=0.003, lengths=LENGTHS, grade_seconds=0.4, train_token_seconds=0.002,
    train_step_seconds=0.3, sync_seconds=0.15,
)  # fmt: skip


def write_run(folder: Path, phases: Phases = PHASES, *, cores: int = 2, overrides: tuple[str, ...] = ()) -> Path:
    """Ten steps of three groups of four at lag 0, one sampler, `cores` graders."""
    recipe = recipe_file.load(QUICKSTART, (*OVERRIDES, *overrides))
    (folder / "rollouts").mkdir(parents=True)
    (folder / "recipe.toml").write_text(recipe_file.dump(recipe))
    (folder / "manifest.json").write_text(json.dumps({"hardware": {"cores": cores}}))
    setup = Setup(len(recipe.rollout.samplers), 1, cores, 3, 4)
    trace = simulate(setup, phases, 10)
    lines = []
    for number, step in enumerate(trace.steps, start=1):
        groups = [g for g in trace.groups if g.taken is not None and step.asked <= g.taken <= step.taken]
        with gzip.open(folder / "rollouts" / f"step-{number:06d}.jsonl.gz", "wt") as file:
            for group in groups:
                for member, length in enumerate(group.lengths):
                    line = {"group": group.number, "member": member, "token_ids": list(range(length))}
                    file.write(json.dumps(line) + "\n")
        values = {
            "step": number,
            "time/sample": step.landed - step.asked,
            "time/grade": step.taken - step.landed,
            "time/train": step.trained - step.taken,
            "time/sync": step.synced - step.trained,
            "tokens/forward": step.tokens,
            "groups/rounds": 1.0,
        }
        lines.append(json.dumps(values))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
