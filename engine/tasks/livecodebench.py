"""LiveCodeBench: public cases as JSON, private ones as JSON or as base64 of zlib of a pickled JSON text.

Format of `livecodebench/code_generation_lite`: question_title, question_content, platform, question_id, contest_date,
starter_code, difficulty, public_test_cases, private_test_cases, metadata {func_name}. A case is {input, output,
testtype `stdin` or `functional`}; a functional input has a JSON value a line, an argument each.
"""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from typing import Any

from engine.tasks.cases import Reading, call_tests, line_calls, stdin_tests
from engine.tasks.prompt import call_prompt, stdin_prompt
from engine.tasks.row import BadRow, Row, embedded, identity, mapping, optional_text, sequence, stratum, text
from engine.types import Task
from sandbox import Tests

MAX_BYTES = 1 << 29  # of one row's private cases, unpacked
_TEXT_ONLY = frozenset({
    "PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8",
})  # fmt: skip


def read_livecodebench(row: Row, how: Reading) -> Task:
    """A LiveCodeBench row as a task: judged by the private cases, and by the public ones too where all are asked for.

    Raises BadRow.
    """
    question = text(row, "question_content")
    name = f"livecodebench/{identity(row, 'question_id')}"
    public = sequence(row.get("public_test_cases"), "public_test_cases")
    private = sequence(unpacked(row.get("private_test_cases")), "private_test_cases")
    cases = public + private if how.cases == "all" else private
    if public and not cases:
        raise BadRow("no hidden case", "every case is public")
    metadata = mapping(row.get("metadata"), "metadata")
    tests, entry_point = _tests(cases, metadata, question, name, how)
    starter, style = optional_text(row, "starter_code"), how.prompt or "livecodebench"
    prompt = call_prompt(question, starter, entry_point, style) if entry_point else stdin_prompt(question, style)
    return Task(
        id=name,
        prompt=prompt,
        tests=tests,
        source=stratum("livecodebench", row.get("platform"), row.get("difficulty")),
    )


def _tests(cases: list[Any], metadata: dict[str, Any], question: str, name: str, how: Reading) -> tuple[Tests, str]:
    if not cases:
        raise BadRow("no cases")
    if not all(isinstance(case, dict) and "input" in case and "output" in case for case in cases):
        raise BadRow("a field cannot be read", "a case must have input and output")
    types = {case.get("testtype") for case in cases}
    pairs = [(case["input"], case["output"]) for case in cases]
    if types == {"stdin"}:
        return stdin_tests(pairs, question, name, how), ""
    if types != {"functional"}:
        raise BadRow("cases of an unknown type", ", ".join(sorted(map(str, types))))
    entry_point = metadata.get("func_name")
    if not isinstance(entry_point, str) or not entry_point:
        raise BadRow("no entry point", "metadata has no func_name")
    return call_tests(entry_point, line_calls(pairs), question, name, how), entry_point


def unpacked(value: object) -> object:
    """private_test_cases without its packing: data, or the JSON text in it. Raises BadRow."""
    if not isinstance(value, str) or not value.strip():
        return value
    if value.lstrip()[:1] in ("[", "{"):
        return embedded(value, "private_test_cases")
    try:
        packed = base64.b64decode(value, validate=True)
        opened = zlib.decompressobj()
        data = opened.decompress(packed, MAX_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise BadRow("a field cannot be read", f"private_test_cases: {error}") from None
    if not opened.eof:
        raise BadRow("a field cannot be read", f"private_test_cases: cut off, or over {MAX_BYTES >> 20} MiB unpacked")
    return embedded(pickled_text(data), "private_test_cases")


def pickled_text(data: bytes) -> str:
    """The one text that a pickle holds. Raises BadRow for a pickle of anything else.

    The pickle is read as a list of operations and never carried out: `pickle.loads` may call anything that a pickle
    names. Only what pickling a `str` writes is allowed, so no global, no call and no object can be in it.
    """
    found: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name not in _TEXT_ONLY:
                raise BadRow("a pickle that is not plain text", f"it has {operation.name}")
            if isinstance(argument, str):
                found.append(argument)
    except (ValueError, IndexError, OverflowError) as error:
        if isinstance(error, BadRow):
            raise
        raise BadRow("a pickle that is not plain text", str(error)[:100]) from None
    if len(found) != 1:
        raise BadRow("a pickle that is not plain text", f"it has {len(found)} texts")
    return found[0]
