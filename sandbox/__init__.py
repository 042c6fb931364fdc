"""Runs one untrusted program in a jail of its own and says what it did. Knows nothing of training."""

from sandbox.jail import find_nsjail
from sandbox.pool import Pool
from sandbox.selftest import PROTECTIONS, selftest
from sandbox.types import (
    VERDICTS,
    AssertTests,
    CallCase,
    CallTests,
    Capability,
    CapabilityTable,
    CaseVerdict,
    Limits,
    SandboxError,
    StdinCase,
    StdinTests,
    Tests,
    Verdict,
)

__all__ = [
    "PROTECTIONS",
    "VERDICTS",
    "AssertTests",
    "CallCase",
    "CallTests",
    "Capability",
    "CapabilityTable",
    "CaseVerdict",
    "Limits",
    "Pool",
    "SandboxError",
    "StdinCase",
    "StdinTests",
    "Tests",
    "Verdict",
    "find_nsjail",
    "selftest",
]
