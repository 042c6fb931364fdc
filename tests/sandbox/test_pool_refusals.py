"""What a pool refuses: broken tests, promises that it can't keep, and command lines that are wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox import (
    AssertTests,
    CallCase,
    CallTests,
    Pool,
    SandboxError,
    StdinCase,
    StdinTests,
    Tests,
    jail,
)
from tests.sandbox.conftest import HONEST, Bench, descriptors


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (StdinTests(()), "no cases"),
        (CallTests("f", ()), "no cases"),
        (CallTests("", (CallCase((1,), 1),)), "entry point"),
        (CallTests("f", (CallCase((object(),), 1),)), "object"),
        (AssertTests("f", "  "), "no code"),
        (StdinTests((StdinCase("", ""),), compare="loose"), "compare"),  # type: ignore[arg-type]
        (StdinTests((StdinCase(b"", ""),)), "text"),  # type: ignore[arg-type]
        ("tests", "unknown kind"),
        (StdinTests((StdinCase("1\n", "2\n"),), checker="def check(:"), "checker"),
        (StdinTests((StdinCase("1\n", "2\n"),), checker="def check(i,o,e): return 1"), "checker"),
        (StdinTests((StdinCase("1\n", "2\n"),), checker="def check(i,o,e): return False"), None),
        (AssertTests("f", "import random\nassert g(random.random())"), "broken"),
        (AssertTests("f", "import random\ndef helper(): pass"), "never call"),
        (AssertTests("f", "assert f(1) == ("), "compile"),
    ],
)
def test_broken_tests_are_infra_at_once(bench: Bench, tests: Tests, reason: str | None) -> None:
    retries = bench.pool.stats.infra_retries
    program = "def f(x): return x\n" if isinstance(tests, (AssertTests, CallTests)) else HONEST
    verdict = bench.grade(program, tests)
    if reason is None:
        assert verdict.verdict == "WA"
    else:
        assert (verdict.verdict, verdict.passed) == ("INFRA", 0)
        assert reason in verdict.detail
    assert bench.pool.stats.infra_retries == retries


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"python": "/nonexistent/python"}, "does not run"),
        ({"python": "/usr/bin/false"}, "does not run"),
        ({"require": ("teleportation",)}, "teleportation"),
        ({"require": ("memory_tree",), "use_cgroups": False}, "memory_tree"),
    ],
)
def test_a_pool_that_cannot_keep_its_promises_does_not_start(settings: dict[str, object], message: str) -> None:
    files = descriptors()

    async def enter() -> None:
        async with Pool(1, **settings):  # type: ignore[arg-type]
            pass

    with pytest.raises(SandboxError, match=message):
        asyncio.run(enter())
    assert descriptors() == files


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"policy": "POLICY a { ALLOW { no_such_call } } USE a DEFAULT KILL"}, "policy"),
        ({"mount": ("/nonexistent/lib", "/lib")}, "did not start"),
    ],
)
def test_a_wrong_command_line_is_an_error_and_not_a_reward(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, object], message: str
) -> None:
    """A wrong name in the policy and a mount that is not there, in the real nsjail."""
    real = jail.argv

    def argv(*args: object, **settings: object) -> list[str]:
        command = real(*args, **settings)  # type: ignore[arg-type]
        if "policy" in broken:
            command[command.index("--seccomp_string") + 1] = str(broken["policy"])
        if "mount" in broken:
            command[1:1] = ["-R", ":".join(broken["mount"])]  # type: ignore[arg-type]
        return command

    monkeypatch.setattr("sandbox.pool.argv", argv)

    async def enter() -> None:
        async with Pool(1):
            pass

    with pytest.raises(SandboxError, match=message):
        asyncio.run(enter())


def test_an_interpreter_that_jails_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    tmp_path.chmod(0o700)
    with pytest.raises(SandboxError, match="cannot read"):
        jail._check_readable(str(tmp_path / "python"))
