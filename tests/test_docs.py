"""Commands in the documentation: each names a command and options that there are, and files that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from engine.cli import commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINES = re.compile(r"^\s*(?:#\s+)?(rlvr [a-z].*|python bench/\S+.*|make [a-z].*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:rlvr [a-z]|python bench/|make [a-z])[^`\[|]*)`")


def said(page: Path) -> list[str]:
    """Commands in blocks and in running text, with lines that go on joined."""
    text = page.read_text().replace("\\\n", " ")
    return [*LINES.findall(text), *(" ".join(found.split()) for found in INLINE.findall(text))]


COMMANDS = sorted({(page.name, command.split("  #")[0].strip()) for page in PAGES for command in said(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_that_a_page_names_is_there(page: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
        script = (ROOT / words[1]).read_text() + (ROOT / "bench" / "report.py").read_text()
        assert all(f'"{word}"' in script for word in words if word.startswith("--"))
    else:
        exists(commands, words[1:])


def exists(group: click.Group, words: list[str]) -> None:
    """The command that the words name, with every option that stands among them."""
    command: click.Command = group
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    assert not isinstance(command, click.Group) or not words, f"no command {words[0]}"
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known | {"--help", "--version"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
