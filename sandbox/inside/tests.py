"""Runs in the tests' process: executes the test code, with a stand-in for the solution.

The stand-in reaches the solution over the wire. All values that come back are of exact built-in types; anything
else is a `Remote`, which equals nothing, is neither true nor false, and answers by asking the solution. With a
solution's source in the input it is executed right here instead: then the tests can be fooled, and are soft.

Report: a dict, packed, in descriptor 3, rewritten after each unit (a test function, `check`, or the top level).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandbox.inside.names import execute, solution_namespace
    from sandbox.inside.program import new_main
    from sandbox.inside.runner import read_file
    from sandbox.inside.wire import Gone, pack_with, receive_message, send_message, unpack_with
    from sandbox.plain import NotPlain, encode

    program = compile("", "", "exec")

report: dict[str, Any] = {"calls": 0, "units": [], "share": "", "gone": "", "broken": "", "ended": False}
exceptions: dict[str, Any] = {}
FUNCTION: Any = type(lambda: None)


class MustShare(BaseException):
    """The tests hand the solution something that cannot cross, such as a function of their own."""


class SolutionGone(BaseException):
    """The solution's process has ended."""


def main() -> None:
    import marshal

    entry_point, source = marshal.loads(read_file(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    leave = os._exit
    save()
    try:
        run_tests(entry_point, source)
    except MustShare as error:
        report["share"] = str(error)
    except SolutionGone as error:
        report["gone"] = str(error) or "it ended"
    report["ended"] = True
    save()
    leave(0)


def save(write: Any = os.pwrite, truncate: Any = os.ftruncate) -> None:
    data = encode(report)
    truncate(3, 0)
    write(3, data, 0)


def run_tests(entry_point: str, source: bytes | None) -> None:
    solution = shared_solution(entry_point, source) if source is not None else remote_solution()
    sys.modules["solution"] = solution
    sys.modules.setdefault("pytest", stand_in_pytest())
    space = new_main("tests")
    del sys.modules["tests"]
    top, _, method = entry_point.partition(".")
    try:
        candidate = getattr(solution, top)
        if method:
            candidate = getattr(candidate(), method)
    except AttributeError as error:
        candidate = method_of_solution(solution, entry_point)
        if candidate is None:
            report["units"].append(["entry point", False, str(error)])
            return
    space[top] = candidate if not method else getattr(solution, top)
    space["candidate"] = candidate
    if not unit("top level", lambda: exec(program, space)):
        return
    if report["calls"] == 0:
        report["units"].clear()  # it only defined the others
    run_check(space, candidate)
    for name, value in list(space.items()):
        if name.startswith("test") and type(value) is FUNCTION:
            run_function(name, value)
        elif isinstance(value, type) and name.startswith("Test"):
            run_class(name, value)


def run_check(space: dict[str, Any], candidate: Any) -> None:
    """HumanEval's `check(candidate)`, unless the test code has called it itself."""
    check: Any = space.get("check")
    if type(check) is FUNCTION and "check" not in {name for name in program.co_names if called_at_top(name)}:
        unit("check", lambda: check(candidate))


def called_at_top(name: str) -> bool:
    """Whether the test code's top level loads `name`: then it has called it itself."""
    import dis

    return any(i.argval == name and i.opname in ("LOAD_NAME", "LOAD_GLOBAL") for i in dis.get_instructions(program))


def run_function(name: str, function: Any) -> None:
    for arguments in parametrized(function):
        unit(name, lambda arguments=arguments: function(**arguments))


def parametrized(function: Any) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [{}]
    for names, rows in getattr(function, "rlvr_cases", []):
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
        made = []
        for row in rows:
            values = [row] if len(keys) == 1 else list(row)
            made += [{**case, **dict(zip(keys, values, strict=True))} for case in cases]
        cases = made
    return cases


def run_class(name: str, kind: Any) -> None:
    for attribute in sorted(dir(kind)):
        if attribute.startswith("test"):
            for arguments in parametrized(getattr(kind, attribute)):

                def run(attribute: str = attribute, arguments: dict[str, Any] = arguments) -> None:
                    made = kind(attribute) if hasattr(kind, "assertEqual") else kind()
                    for before in ("setUp", "setup_method"):
                        if hasattr(made, before):
                            getattr(made, before)()
                    getattr(made, attribute)(**arguments)

                unit(f"{name}.{attribute}", run)


def unit(name: str, run: Any) -> bool:
    """Run one and note how it went; whether it passed."""
    try:
        run()
    except (MustShare, SolutionGone):
        raise
    except BaseException as error:
        if report["calls"] == 0 and not isinstance(error, AssertionError):
            report["broken"] = f"{type(error).__name__}: {error}"[:500]
        report["units"].append([name, False, f"{type(error).__name__}: {error}"[:500]])
        save()
        return False
    report["units"].append([name, True, ""])
    save()
    return True


def stand_in_pytest() -> Any:
    module = type(sys)("pytest")
    module.__dict__.update({name: globals()[name] for name in ("raises", "approx", "mark", "param", "fail")})
    return module


def method_of_solution(solution: Any, entry_point: str) -> Any:
    """A method of `Solution`, when no top-level name is the entry point."""
    try:
        return getattr(solution.Solution(), entry_point)
    except AttributeError:
        return None


def shared_solution(entry_point: str, source: bytes) -> Any:
    code = compile(source, "/tmp/solution.py", "exec", dont_inherit=True)
    space = solution_namespace(code)
    if execute(code, space) != 0:
        raise SolutionGone("the program ended with an error")
    report["calls"] = 1
    return sys.modules["solution"]


def remote_solution() -> Any:
    try:
        first = receive_message()
    except Gone as error:
        raise SolutionGone(str(error)) from None
    if first != ["ready"]:
        raise SolutionGone("it did not start")
    return RemoteModule("solution")


def ask(operation: str, target: int | None, *args: Any, **named: Any) -> Any:
    """One request. Raises what the solution raised, MustShare, or SolutionGone."""
    try:
        packed = [pack_with(item, refuse) for item in args]
        request = [operation, target, packed, {key: pack_with(value, refuse) for key, value in named.items()}]
    except NotPlain as error:
        raise MustShare(str(error)) from None
    if operation not in ("name", "mro"):
        report["calls"] += 1
        if report["calls"] == 1:
            save()  # from here on, what goes wrong is laid to the solution
    try:
        send_message(request)
        reply = receive_message()
        if type(reply) is list and len(reply) == 3 and reply[0] == "value":
            value = unpack_with(reply[1], Remote)
            for given, after in zip(args, reply[2], strict=False):
                if after is not None:
                    refresh(given, unpack_with(after, Remote))
            return value
        kind, names, text = reply
        raised = exception_class([str(name) for name in names])(str(text)) if kind == "raise" else None
    except (Gone, NotPlain, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SolutionGone(f"{error}") from None
    if raised is None:
        raise SolutionGone("its answer is malformed")
    report["calls"] += 1  # also for a name that the solution does not define
    raise raised


def refuse(value: Any) -> int:
    if type(value) is Remote:
        return value.__dict__["number"]
    raise NotPlain(f"the tests pass an object of type {type(value).__name__}")


def refresh(given: Any, after: Any) -> None:
    """What the solution did to a list, dict or set that the tests passed, done here too."""
    if type(given) is list and type(after) is list:
        given[:] = after
    elif type(given) in (dict, set) and type(after) is type(given):
        given.clear()
        given.update(after)


def exception_class(names: list[str]) -> Any:
    """The builtin exception of that name, or a new one below the first builtin among its bases."""
    import builtins

    base: Any = Exception
    for name in names:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            base = found
            break
    if not names or names[0] == base.__name__:
        return base
    key = names[0]
    if key not in exceptions:
        exceptions[key] = type(key, (base,), {})
    return exceptions[key]


class RemoteModule(type(sys)):  # type: ignore[misc]
    """`solution`: its names are asked for when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = ask("name", None, name)
        if type(value) is Remote:
            names = ask("mro", value.__dict__["number"])
            if isinstance(names, list) and "Exception" in names:
                return exception_class(names)
        return value


def special(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return ask("special", self.__dict__["number"], name, *args)

    return method


class Remote:
    """An object of the solution's that stays there. It has no opinion on whether it equals anything."""

    def __init__(self, number: int) -> None:
        if type(number) is not int:
            raise ValueError("a handle must be a number")
        self.__dict__["number"] = number

    def __call__(self, *args: Any, **named: Any) -> Any:
        return ask("call", self.__dict__["number"], *args, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("get", self.__dict__["number"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self.__dict__["number"], name, value)

    def __iter__(self) -> Any:
        items = ask("list", self.__dict__["number"])
        return iter(items if type(items) is list else [])

    def __instancecheck__(self, value: Any) -> bool:
        return ask("isinstance", self.__dict__["number"], value) is True

    def __bool__(self) -> bool:
        raise TypeError("an object of the solution's is neither true nor false")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        text = ask("special", self.__dict__["number"], "__str__")
        return text if type(text) is str else ""

    def __repr__(self) -> str:
        text = ask("special", self.__dict__["number"], "__repr__")
        return text if type(text) is str else ""

    def __len__(self) -> int:
        try:
            size = ask("special", self.__dict__["number"], "__len__")
        except AttributeError as error:
            raise TypeError(str(error)) from None
        if type(size) is not int or size < 0:
            raise TypeError("its length is not a number")
        return size


for _name in (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__contains__",
    "__add__",
    "__sub__",
    "__mul__",
    "__neg__",
):
    setattr(Remote, _name, special(_name))
