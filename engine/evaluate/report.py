"""A result in words: Markdown with a table of suites, and a plot of the gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from engine.evaluate.compare import Row, table
from engine.types import SuiteResult

WIDTH, LINE, LEFT, MARGIN = 640, 34, 220, 30


def write_report(
    folder: Path, protocol: Mapping[str, Any], results: Sequence[SuiteResult], rows: Sequence[Row], against: str
) -> Path:
    """report.md, and gains.svg beside it where there is a baseline; the report's path.

    rows: each suite against the baseline, which is named `against`; empty without one.
    """
    lines = [f"# {protocol['model']['name']}", "", *_facts(protocol["model"]), "", *_suites(results)]
    if rows:
        (folder / "gains.svg").write_text(plot(rows), encoding="utf-8")
        lines += ["", f"## Against {against}", "", *table(rows), "", "![gains](gains.svg)"]
        lines += ["", "Paired bootstrap over problems, 10,000 resamples."]
    lines += ["", "## By source", "", *_sources(results), "", "## Settings", ""]
    lines += [f"- {key}: `{value}`" for key, value in protocol["settings"].items()]
    lines += [f"- suite {name}: `{suite['source']}`, {suite['tasks']} tasks" for name, suite in _sets(protocol)]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plot(rows: Sequence[Row]) -> str:
    """Gains in points with their 95 % intervals, as an SVG that reads on light and dark ground."""
    ends = [100 * value for row in rows for value in (row.gain.low, row.gain.high, 0.0)]
    low, high = min(ends), max(ends)
    span = max(high - low, 1.0)

    def x(points: float) -> float:
        return LEFT + (points - low) / span * (WIDTH - LEFT - MARGIN)

    height = LINE * len(rows) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" fill="#808080">',
        f'<line x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{MARGIN / 2}" y2="{height - MARGIN}" stroke="#808080"/>',
    ]
    for index, row in enumerate(rows):
        y = MARGIN + LINE * index + LINE / 2
        a, middle, b = (x(100 * value) for value in (row.gain.low, row.gain.mean, row.gain.high))
        parts += [
            f'<text x="8" y="{y + 4:.1f}">{escape(row.suite[:28])}</text>',
            f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#4080c0" stroke-width="3"/>',
            f'<circle cx="{middle:.1f}" cy="{y:.1f}" r="5" fill="#4080c0"/>',
            f'<text x="{middle:.1f}" y="{y - 9:.1f}" text-anchor="middle">{100 * row.gain.mean:+.1f}</text>',
        ]
    parts.append(f'<text x="{x(0):.1f}" y="{height - 8}" text-anchor="middle">0 points</text></svg>')
    return "\n".join(parts) + "\n"


def _facts(model: Mapping[str, Any]) -> list[str]:
    return [f"- {key}: `{value}`" for key, value in model.items() if key != "name" and value is not None]


def _suites(results: Sequence[SuiteResult]) -> list[str]:
    ks = list(dict.fromkeys(k for result in results for k in result.pass_at))
    shares = ("NO_CODE", "CE", "TLE")
    heads = ["suite", "problems", "answers", *ks, "of finished", "truncated", "no code", "no Python", "time-out"]
    lines = [f"| {' | '.join([*heads, 'mean tokens'])} |", f"|---{'|---:' * len(heads)}|"]
    for r in results:
        cells = [r.name, str(len(r.by_problem)), str(r.answers)]
        cells += [f"{r.pass_at[k]:.3f}" if k in r.pass_at else "" for k in ks]
        cells += [f"{r.finished_pass_rate:.3f}", f"{r.truncated_share:.3f}"]
        cells += [f"{r.verdicts.get(verdict, 0) / r.answers:.3f}" for verdict in shares]
        lines.append(f"| {' | '.join([*cells, f'{r.mean_tokens:.0f}'])} |")
    return lines


def _sources(results: Sequence[SuiteResult]) -> list[str]:
    lines = ["| suite | source | pass@1 |", "|---|---|---:|"]
    return lines + [f"| {r.name} | {source} | {rate:.3f} |" for r in results for source, rate in r.by_source.items()]


def _sets(protocol: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    return list(protocol["suites"].items())
