"""Runs inside jails: the module that a solution to a call problem is, and its entry point."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from sandbox.inside.program import new_main, report_error

PRELUDE = {
    "typing": "List Dict Set Tuple Optional Union Any Callable Iterable Iterator Sequence Deque DefaultDict Generator",
    "collections": "deque defaultdict Counter OrderedDict namedtuple",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby pairwise "
    "permutations product zip_longest",
    "functools": "lru_cache cache reduce cmp_to_key partial",
    "heapq": "heappush heappop heapify heappushpop heapreplace nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "math": "inf gcd lcm sqrt ceil floor comb factorial isqrt log log2",
    "": "collections itertools functools heapq bisect math re string random operator copy sys typing",
}


def solution_namespace(program: CodeType) -> dict[str, Any]:
    """A module called `solution`, with the usual names that the program uses, for it to overwrite.

    Solutions to call problems leave out `from typing import List` and the like, because the sites that set
    them import those names.
    """
    space = new_main("solution")
    used = names_of(program)
    for module, names in PRELUDE.items():
        for name in names.split():
            if name in used:
                space[name] = getattr(__import__(module), name) if module else __import__(name)
    return space


def names_of(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is type(code):
            found |= names_of(constant)
    return found


def find_entry(space: dict[str, Any], entry_point: str) -> Any:
    """A function, `Class.method`, or a method of `Solution`. Raises NameError."""
    owner, dot, method = entry_point.rpartition(".")
    if dot and owner in space:
        return getattr(space[owner](), method)
    if entry_point in space:
        return space[entry_point]
    if "Solution" in space and hasattr(space["Solution"], entry_point):
        return getattr(space["Solution"](), entry_point)
    raise NameError(f"the program does not define {entry_point!r}")


def execute(code: CodeType, space: dict[str, Any]) -> int:
    """Execute a solution that is going to be called; the exit code. One that exits has nothing to call."""
    try:
        exec(code, space)
    except SystemExit:
        os.write(2, b"the program exited instead of defining its functions\n")
        return 1
    except BaseException as error:
        report_error(error)
        return 1
    return 0
