"""What a check is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from psengine.environment.variables import inherited_variables


class Level(str, Enum):
    """How bad a finding is; only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"  # worth knowing
    WARNING = "warning"  # costs time, or will fail later
    PROBLEM = "problem"  # training will fail, or not do what was asked for


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: how bad it is.
        text: what was found, with the numbers.
        fix: what to do about it; "" where there is nothing to do.
        facts: the numbers of the text, for programs.
    """

    level: Level
    text: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What checks look at besides the machine itself.

    Attributes:
        variables: the environment this process was started with.
        servers: addresses of parameter servers.
        model_bytes: size of the user's parameters, to say what a step costs; None where it is not known.
        timeout_s: deadline of one answer of a server.
    """

    variables: Mapping[str, str]
    servers: Sequence[str] = ()
    model_bytes: int | None = None
    timeout_s: float = 5.0

    @property
    def spans_hosts(self) -> bool:
        """Whether the launcher's variables say that there are ranks on other hosts."""
        world_size = self.number("WORLD_SIZE")
        return self.number("SLURM_NNODES") > 1 or world_size > self.number("LOCAL_WORLD_SIZE", world_size)

    def number(self, name: str, default: int = 0) -> int:
        """The value of a variable that consists of digits, else ``default``."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isdecimal() else default


Check = Callable[[CheckContext], Iterator[Finding]]


def ok(text: str, **facts: Any) -> Finding:
    """All is as it should be."""
    return Finding(Level.OK, text, facts=facts)


def note(text: str, fix: str = "", **facts: Any) -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, text, fix, facts)


def warning(text: str, fix: str, **facts: Any) -> Finding:
    """Costs time, or will fail later."""
    return Finding(Level.WARNING, text, fix, facts)


def problem(text: str, fix: str, **facts: Any) -> Finding:
    """Training will fail, or not do what was asked for."""
    return Finding(Level.PROBLEM, text, fix, facts)


def problem_of(error: Exception, fix: str, subject: str = "") -> Finding:
    """A problem in an error's own words, with the error's own fix where its message has one."""
    text, _, own_fix = str(error).partition(" Fix: ")
    return problem(text if not subject or text.startswith(subject) else f"{subject}: {text}", own_fix or fix)


def read_text(path: str | Path) -> str:
    """The text of a small file of /proc or /sys; "" where it cannot be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def started_with() -> dict[str, str]:
    """The environment this process was started with, before libraries changed it; today's where there is no /proc."""
    pairs = (entry.partition("=") for entry in read_text("/proc/self/environ").split("\0") if entry)
    return {name: value for name, _, value in pairs} or inherited_variables()
