"""Of the ranks that ended badly, which failed first, and what did it say? Pure.

One rank fails; the others lose their peer and raise in turn, or are ended by the launcher. A user wants to read the
traceback of the first. We report the earliest failure that is not a lost-peer error, timed by its final traceback, else
by its exit.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_TRACEBACK_LINES = 60
# An interpreter may take this long to end after its last traceback.
MAX_TEARDOWN_S = 30.0
# The lines of one traceback are written together; a program that writes later has survived the error.
ONE_MESSAGE_S = 1.0
# Python's exit code after an error that nobody handled.
UNHANDLED = 1
# The ``rank`` of a node's launcher.
LAUNCHER = -1

_HEADER = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):")
_FATAL = re.compile(r"Fatal Python error: |terminate called ")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# The launcher knows a rank's error only as text on stderr.
_PEER_LOST = re.compile(
    r"PeerLostError|Connection closed by peer|Connection reset by peer|connection was forcibly closed|ncclRemoteError"
    r"|Broken pipe|recvValue failed"
)
_MEANINGS = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error: no space left in shared memory?",
    signal.SIGTERM: "somebody ended it",
}
# By whether the kernel ended a process for lack of memory.
_KILLED = {
    True: "out of memory: the kernel ended a process of this host; see its log (dmesg)",
    False: "by someone or by the kernel, but not for lack of memory",
    None: "by someone or by the kernel, perhaps for lack of memory: see its log (dmesg)",
}


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank's process ended, or a node's launcher (rank ``LAUNCHER``).

    Attributes:
        exit_code: negative for a signal.
        failed_s: when it failed, ``time.time()``; None where nobody saw it.
        was_ended: the launcher ended it.
        traceback: the last one in its stderr, else its last lines.
        restarts: how often it had been started again.
        is_independent: it is an independent worker, whose number is ``rank``.
        was_short_of_memory: the kernel of its host ended a process for lack of memory during the run; None where the
            kernel does not tell.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    host: str = field(default_factory=socket.gethostname)
    failed_s: float | None = None
    was_ended: bool = False
    traceback: Sequence[str] = ()
    restarts: int = 0
    is_independent: bool = False
    was_short_of_memory: bool | None = None

    @property
    def speaks_of_peer(self) -> bool:
        """Whether its error is that another rank is gone."""
        return any(_PEER_LOST.search(line) for line in self.traceback[-8:])

    @property
    def name(self) -> str:
        """Rank, local rank and host in words; of an independent worker its number."""
        if self.rank == LAUNCHER:
            return f"the launcher on host {self.host}"
        if self.is_independent:
            return f"worker {self.rank} on host {self.host}"
        return f"rank {self.rank} (local rank {self.local_rank}) on host {self.host}"

    @property
    def how(self) -> str:
        """Its exit code in words."""
        return describe_exit(self.exit_code, self.was_short_of_memory)

    @property
    def last_words(self) -> str:
        """The last line of its stderr that is not empty."""
        return next((line.strip() for line in reversed(self.traceback) if line.strip()), "")


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first; None where none failed."""
    failed = [end for end in ends if end.exit_code != 0]
    failed = [end for end in failed if not end.was_ended] or failed
    return min(failed, key=lambda end: (end.speaks_of_peer, end.failed_s or float("inf"), end.rank), default=None)


def last_traceback(lines: Sequence[tuple[float, str]]) -> tuple[float | None, tuple[str, ...]]:
    """(when it was written, its lines) of the last traceback in ``lines``, with the tracebacks of its causes.

    When is None where the program went on writing. The report of a fatal signal (Python's faulthandler) counts as a
    traceback. Without any: (None, the last ten lines).
    """
    headers = [index for index, (_, line) in enumerate(lines) if _HEADER.match(line) or _FATAL.match(line)]
    if not headers:
        return None, tuple(line for _, line in lines[-10:])
    start = headers.pop()
    written_s = lines[start][0]
    last_s = max(when for when, line in lines[start:] if line.strip())
    while headers and any(line in _CHAINED for _, line in lines[max(0, start - 2) : start]):
        start = headers.pop()
    found = [line for _, line in lines[start:]]
    if len(found) > MAX_TRACEBACK_LINES:
        half = MAX_TRACEBACK_LINES // 2
        found = [*found[:half], f"... {len(found) - 2 * half} lines left out ...", *found[-half:]]
    return written_s if last_s - written_s <= ONE_MESSAGE_S else None, tuple(found)


def failure_time(exit_code: int, spoke_s: float | None, ended_s: float | None) -> float | None:
    """When a rank failed: when it wrote its final traceback, because the interpreter may take a while to end after it.

    A rank that was killed, ended with a code of the program's own, or ran on for long had survived its traceback.
    """
    if exit_code != UNHANDLED or spoke_s is None or ended_s is None:
        return ended_s
    return spoke_s if ended_s - spoke_s < MAX_TEARDOWN_S else ended_s


def describe_exit(exit_code: int, was_short_of_memory: bool | None = None) -> str:
    """An exit code in words; negative for a signal. Nothing tells who sent SIGKILL, only whether memory was short."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    if number == signal.SIGKILL:
        meaning: str | None = _KILLED[was_short_of_memory]
    else:
        meaning = _MEANINGS.get(number)
    return f"killed by {number.name}" + (f" ({meaning})" if meaning else "")


def shell_status(exit_code: int) -> int:
    """The exit code with which a shell would report it: 128 + the signal's number."""
    return exit_code if exit_code >= 0 else 128 - exit_code
