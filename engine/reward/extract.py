"""From the text of an answer to the program in it. Standard library only; runs nothing of the answer."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*(.*?)[ \t]*$")
_LANGUAGE = re.compile(r"\{?\.?([A-Za-z0-9_+#.-]*)")
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "python3.11", "python3.12"})
_MAX_PARSED = 1 << 17  # characters; a longer text is never parsed on the host


@dataclass(frozen=True, slots=True)
class Extraction:
    """program: what is to be run, None if there is nothing. truncated: its block, or the thinking, never ended.
    reason: in words, why this program or none."""

    program: str | None
    truncated: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Block:
    language: str
    code: str
    closed: bool


def extract_program(text: str, *, thinking: bool = False, bare: bool = False) -> Extraction:
    """The program of an answer.

    Only what follows the last `</think>` counts; a `<think>` that never ends leaves nothing. Of the fenced blocks
    there the last one tagged as Python is taken, else the last untagged one that parses; other languages are
    passed over. A last block that was cut off counts only if it parses. Indentation common to a block is removed.

    thinking: the prompt already opened `<think>`, so an answer without `</think>` is all thought.
    bare: an answer without any fence that parses as a whole is a program.
    """
    before, end, answer = text.rpartition("</think>")
    if thinking and not end:
        return Extraction(None, True, "the thinking never ended")
    answer = answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if _opens_thought(answer):
        return Extraction(None, True, "the thinking never ended")
    blocks = _blocks(answer)
    if not blocks:
        if bare and answer.strip() and parses(answer):
            return Extraction(answer, False, "the whole answer")
        where = "after </think>" if end and before.strip() else "in the answer"
        return Extraction(None, False, f"no code block {where}")
    return _choose(blocks)


def _opens_thought(answer: str) -> bool:
    """Whether a thought is opened outside any block: inside one, `<think>` is the program's text."""
    opened = answer.find("<think>")
    if opened < 0:
        return False
    inside = False
    for line in answer[:opened].split("\n"):
        if _FENCE.match(line):
            inside = not inside
    return not inside


def _choose(blocks: list[_Block]) -> Extraction:
    tagged = [block for block in blocks if block.language in _PYTHON]
    untagged = [block for block in blocks if not block.language]
    if tagged:
        return _accept(tagged[-1], "the last Python block")
    for block in reversed(untagged):
        if block.code.strip() and parses(block.code):
            return _accept(block, "the last untagged block that parses")
    if untagged:
        return Extraction(None, not untagged[-1].closed, "no untagged block parses")
    return Extraction(None, False, f"no Python block (only {', '.join(sorted({b.language for b in blocks}))})")


def _accept(block: _Block, reason: str) -> Extraction:
    if not block.code.strip():
        return Extraction(None, not block.closed, f"{reason} is empty")
    if not block.closed and not parses(block.code):
        return Extraction(None, True, f"{reason} was cut off and does not parse")
    return Extraction(block.code, not block.closed, reason)


def _blocks(answer: str) -> list[_Block]:
    """The fenced blocks, as CommonMark has them, at any indentation."""
    blocks: list[_Block] = []
    fence, depth, language, lines = "", 0, "", list[str]()
    for line in answer.split("\n"):
        found = _FENCE.match(line)
        if not fence:
            if found and not (found[2][0] == "`" and "`" in found[3]):
                fence, depth, lines = found[2], len(found[1].expandtabs(4)), []
                language = _language(found[3])
            continue
        closes = found and found[2][0] == fence[0] and len(found[2]) >= len(fence) and not found[3]
        if found and closes and len(found[1].expandtabs(4)) <= depth + 3:
            blocks.append(_Block(language, _dedent(lines), True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        blocks.append(_Block(language, _dedent(lines), False))
    return blocks


def _language(info: str) -> str:
    found = _LANGUAGE.match(info.lower())
    return found[1] if found else ""


def _dedent(lines: list[str]) -> str:
    text = "\n".join(lines).removeprefix("\ufeff")
    if text.lstrip("\n")[:1] in (" ", "\t"):
        text = textwrap.dedent(text)
    return text + "\n" if text.strip() else ""


def parses(code: str) -> bool:
    """Whether it is Python by its syntax. Never raises."""
    if len(code) > _MAX_PARSED:
        return False
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    return True
