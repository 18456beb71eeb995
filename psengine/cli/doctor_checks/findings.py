"""What a check is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        level: "ok"; "note", worth knowing; "warning", costs time or will fail later; "problem", training fails, or does
            not do what was asked for.
        text: what was found, with the numbers.
        fix: what to do about it; "" where there is nothing to do.
    """

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """What checks look at besides the machine itself.

    Attributes:
        variables: the environment this process was started with.
        servers: addresses of parameter servers, instead of those of PSENGINE_SERVERS.
        timeout_s: deadline of one answer of a server.
    """

    variables: Mapping[str, str]
    servers: str | None = None
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


def problem_of(error: Exception, fix: str, subject: str) -> Finding:
    """A problem in an error's own words, with the error's own fix where its message has one."""
    text, _, own_fix = str(error).partition(" Fix: ")
    return Finding("problem", f"{subject}: {text}", own_fix or fix)


def read_text(path: str | Path) -> str:
    """The text of a small file of /proc or /sys; "" where it cannot be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""
