"""Which modules a program will import, so that the runner does it once and not once a case."""

from __future__ import annotations

import re

# Importing one of these runs nothing of the program's and has no effect that a case could notice.
KNOWN = frozenset(
    [
        "array",
        "ast",
        "base64",
        "binascii",
        "bisect",
        "bz2",
        "calendar",
        "cmath",
        "collections",
        "collections.abc",
        "contextlib",
        "copy",
        "csv",
        "ctypes",
        "dataclasses",
        "datetime",
        "decimal",
        "difflib",
        "enum",
        "fractions",
        "functools",
        "gc",
        "hashlib",
        "heapq",
        "hmac",
        "inspect",
        "io",
        "itertools",
        "json",
        "keyword",
        "math",
        "numbers",
        "numpy",
        "operator",
        "os",
        "os.path",
        "pprint",
        "queue",
        "random",
        "re",
        "secrets",
        "select",
        "shutil",
        "signal",
        "statistics",
        "string",
        "struct",
        "subprocess",
        "tempfile",
        "textwrap",
        "threading",
        "time",
        "timeit",
        "traceback",
        "types",
        "typing",
        "unicodedata",
        "uuid",
        "weakref",
        "zlib",
    ]
)
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w.,\t ]+)|from[ \t]+([\w.]+)[ \t]+import\b)", re.MULTILINE)


def hints(program: str) -> str:
    """Known modules that the text seems to import, by comma. A guess: what it misses is only slower."""
    found: dict[str, None] = {}
    for names, origin in _IMPORT.findall(program):
        for part in (names or origin).split(","):
            words = part.split()
            if words and words[0] in KNOWN:
                found[words[0]] = None
    return ",".join(found)
