"""What a check is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from psengine.environment.context import inherited_variables


class Level(str, Enum):
    """How bad a finding is; only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"  # worth knowing
    WARNING = "warning"  # will bite somebody, or costs time
    PROBLEM = "problem"  # training will fail, or not do what was asked for


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: how bad it is.
        text: what was found, with the numbers.
        fix: what to do about it; "" where there is nothing to do.
        facts: the same for programs.
    """

    level: Level
    text: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What checks look at, where it is not the machine itself.

    Attributes:
        variables: the environment this process was started with.
        servers: addresses of parameter servers.
        model_bytes: size of the user's parameters, to say what a step costs; None where it was not told.
        timeout_s: deadline of one answer of a server, and of meeting another process.
    """

    variables: Mapping[str, str]
    servers: Sequence[str] = ()
    model_bytes: int | None = None
    timeout_s: float = 5.0

    @property
    def spans_hosts(self) -> bool:
        """Whether the launcher's variables say that there are ranks on other hosts."""
        world, local = self.number("WORLD_SIZE"), self.number("LOCAL_WORLD_SIZE")
        nodes = self.number("SLURM_NNODES")
        return (world is not None and local is not None and world > local) or (nodes is not None and nodes > 1)

    def number(self, name: str) -> int | None:
        """A variable's value where it is a number of digits, else None."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isdecimal() else None


Check = Callable[[Circumstances], Iterator[Finding]]


def ok(text: str, **facts: Any) -> Finding:
    """All is as it should be."""
    return Finding(level=Level.OK, text=text, facts=facts)


def note(text: str, fix: str = "", **facts: Any) -> Finding:
    """Worth knowing."""
    return Finding(level=Level.NOTE, text=text, fix=fix, facts=facts)


def warning(text: str, fix: str, **facts: Any) -> Finding:
    """Will bite somebody, or costs time."""
    return Finding(level=Level.WARNING, text=text, fix=fix, facts=facts)


def problem(text: str, fix: str, **facts: Any) -> Finding:
    """Training will fail, or not do what was asked for."""
    return Finding(level=Level.PROBLEM, text=text, fix=fix, facts=facts)


def started_with() -> dict[str, str]:
    """The variables this process was started with, before any library set its own; those of now without a /proc."""
    content = read_text("/proc/self/environ")
    if not content:
        return inherited_variables()
    pairs = (entry.partition("=") for entry in content.split("\0") if entry)
    return {name: value for name, _, value in pairs}


def read_text(path: str | Path) -> str:
    """The text of a small file of /proc or /sys; "" where it cannot be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def size_text(size_bytes: float) -> str:
    """A size as people say it: 512 MiB, 1.5 GiB."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"
