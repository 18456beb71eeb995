"""Of the ranks that ended badly, which was first, and what did it say? Pure.

One rank fails; the others lose their peer, raise in turn, or are ended by the launcher. What a user wants to read is
the first one's traceback. The first is the rank whose failure is no consequence of another's (its last error does not
speak of a lost peer), and among those the one that spoke or died earliest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_TRACEBACK_LINES = 60
LONGEST_TEARDOWN_S = 30.0
# The lines of one error's message come together; what comes later was said by a program that went on.
ONE_MESSAGE_S = 1.0
# With which Python ends after an error that nobody handled.
UNHANDLED = 1

_HEADER = re.compile(r"\s*(\+ )?(Exception Group )?Traceback \(most recent call last\):")
_FATAL = re.compile(r"Fatal Python error: |terminate called ")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_PEER_LOST = re.compile(
    r"PeerLostError|Connection closed by peer|Connection reset by peer|connection was forcibly closed|ncclRemoteError"
    r"|Broken pipe|recvValue failed"
)
_MEANINGS = {
    signal.SIGKILL: "out of memory? the kernel's log says",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error: no space left in shared memory?",
    signal.SIGTERM: "somebody ended it",
}


# In a rank's place: the end is that of a node's launcher.
LAUNCHER = -1


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank's process ended, or a node's launcher.

    Attributes:
        rank, local_rank, host, pid: whose; ``rank`` is ``LAUNCHER`` where it was a launcher.
        exit_code: negative for a signal.
        ended_s: when its process was gone, ``time.time()``; None where nobody saw it.
        was_ended: the launcher ended it.
        failed_s: when it wrote ``traceback``, else ``ended_s``.
        traceback: the last one in its stderr, or what stands there in its place.
        restarts: how often it had been started again.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exit_code: int
    ended_s: float | None = None
    was_ended: bool = False
    failed_s: float | None = None
    traceback: tuple[str, ...] = ()
    restarts: int = 0

    @property
    def speaks_of_peer(self) -> bool:
        """Whether its error is that another rank is gone."""
        return bool(self.traceback) and any(_PEER_LOST.search(line) for line in self.traceback[-8:])

    @property
    def name(self) -> str:
        """Rank, local rank and host in words."""
        if self.rank == LAUNCHER:
            return f"the launcher on host {self.host}"
        return f"rank {self.rank} (local rank {self.local_rank}) on host {self.host}"


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first; None where none failed."""
    failed = [end for end in ends if end.exit_code != 0]
    failed = [end for end in failed if not end.was_ended] or failed
    if not failed:
        return None
    forever = float("inf")
    return min(failed, key=lambda end: (end.speaks_of_peer, end.failed_s or end.ended_s or forever, end.rank))


def last_traceback(lines: Sequence[tuple[float, str]]) -> tuple[float | None, tuple[str, ...]]:
    """(when it was written, its lines) of the last traceback in ``lines``, with those it says were its causes.

    When is None where the program went on writing: it lived through that error. A fatal signal's report counts as a
    traceback (Python's faulthandler). Without any: (None, the last ten lines).
    """
    start = None
    for index, (_, line) in enumerate(lines):
        if _FATAL.match(line) or (_HEADER.match(line) and not _is_within(lines, start, index)):
            start = index
    if start is None:
        return None, tuple(line for _, line in lines[-10:])
    is_over = not _goes_on(lines, start)
    while True:
        link = start - 1
        while link >= 0 and not lines[link][1].strip():
            link -= 1
        if link < 0 or lines[link][1].strip() not in CHAINED:
            break
        cause = max((i for i in range(link) if _HEADER.match(lines[i][1])), default=None)
        if cause is None:
            break
        start = cause
    found = [line for _, line in lines[start:]]
    if len(found) > LONGEST_TRACEBACK_LINES:
        half = LONGEST_TRACEBACK_LINES // 2
        left_out = len(found) - 2 * half
        found = [*found[:half], f"... {left_out} lines left out ...", *found[-half:]]
    return lines[start][0] if is_over else None, tuple(found)


def failure_time(exit_code: int, spoke_s: float | None, ended_s: float | None) -> float | None:
    """When a rank failed: when it wrote its traceback, because the interpreter may take a while to end after that.

    Only one that it ended of: who was killed, ended with a code of the program's own, or went on for long, has lived
    through its traceback.
    """
    if exit_code != UNHANDLED or spoke_s is None or ended_s is None:
        return ended_s
    return spoke_s if ended_s - spoke_s < LONGEST_TEARDOWN_S else ended_s


def _goes_on(lines: Sequence[tuple[float, str]], start: int) -> bool:
    """Whether something was written well after the traceback at ``start``."""
    index = start + 1
    while index < len(lines) and (lines[index][1].startswith((" ", "+", "|")) or not lines[index][1].strip()):
        index += 1
    written_s = lines[min(index, len(lines) - 1)][0]  # the error itself, behind its frames
    return any(line.strip() and when > written_s + ONE_MESSAGE_S for when, line in lines[index:])


def _is_within(lines: Sequence[tuple[float, str]], start: int | None, index: int) -> bool:
    """Whether the traceback at ``index`` is a part of the exception group at ``start``."""
    if start is None or "Exception Group" not in lines[start][1]:
        return False
    return all(line.lstrip().startswith(("+", "|")) for _, line in lines[start + 1 : index + 1] if line.strip())


def describe_exit(exit_code: int) -> str:
    """An exit code in words; negative for a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    meaning = _MEANINGS.get(number)
    return f"killed by {number.name}" + (f" ({meaning})" if meaning else "")


def shell_status(exit_code: int) -> int:
    """The exit code with which a shell would report it: 128 + the signal's number."""
    return exit_code if exit_code >= 0 else 128 - exit_code
