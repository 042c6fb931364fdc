"""The quickstart's table: `python bench/quickstart.py RUN...` prints a row for each run's summary.json.

Runs are made with `rlvr run recipes/quickstart.toml --set run.seed=N --output runs/seed-N`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def row(folder: Path) -> str:
    """One run as a row of a Markdown table."""
    summary = json.loads((folder / "summary.json").read_text())
    steps, seconds = summary["steps"], summary["seconds"]
    cells = [str(summary["seed"])]
    for suite in summary["suites"].values():
        low, high = suite["ci95"]
        cells += [f"{suite['before']:.3f} -> {suite['after']:.3f}", f"{suite['gain']:+.3f} [{low:+.3f}, {high:+.3f}]"]
    cells += [f"{seconds[phase] / steps:.1f}" for phase in ("sample", "grade", "train", "sync")]
    return f"| {' | '.join([*cells, format(summary['tokens_per_second'], '.0f')])} |"


def main() -> None:
    """Print the table of the runs named on the command line."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    if not folders:
        sys.exit(__doc__)
    suites = json.loads((folders[0] / "summary.json").read_text())["suites"]
    heads = ["seed", *(head for name in suites for head in (name, "gain [95 %]")), "sample s", "grade s", "train s"]
    print(f"| {' | '.join([*heads, 'sync s', 'tokens/s'])} |")
    print("|" + "---|" * (len(heads) + 2))
    for folder in folders:
        print(row(folder))


if __name__ == "__main__":
    main()
