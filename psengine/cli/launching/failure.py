"""How a rank ended, which rank failed first, and what a user reads of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from psengine.errors import FencedError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HEADER = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: |terminate called ")
# Of a rank whose peer is gone; its own message comes later than the cause, and often at the same moment as its end.
_PEER_LOST = re.compile(r"PeerLostError|Connection (closed|reset) by peer|ncclRemoteError|Broken pipe|recvValue failed")
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
# A program that cannot be read, or lacks a module or a name.
_UNREADABLE = re.compile(r"(Syntax|Indentation|Tab|Import|ModuleNotFound|Name)Error: ")
# Of a rank's stderr, which may be long, the part that is searched for a traceback.
_LAST_BYTES = 256 << 10
EXIT_USAGE = 2
_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank, or an independent worker, failed.

    Attributes:
        exit_code: negative for a signal.
        failed_s: when it raised its error, else when its end was noticed; ``time.time()``.
        was_ended: the launcher ended it.
        words: what it said of its error: the user's line and the sentence, or the last traceback.
        hint: how to learn more than ``words``.
        is_refused: psengine refused what the program asks for.
    """

    rank: int
    exit_code: int
    failed_s: float
    was_ended: bool = False
    words: tuple[str, ...] = ()
    hint: str = ""
    is_refused: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the same program would fail so again. Exit code 2 is that of a wrong command line."""
        return self.is_refused or self.exit_code == EXIT_USAGE or bool(_UNREADABLE.match(_last(self)))

    @property
    def lost_peer(self) -> bool:
        """Whether its error is that another rank is gone."""
        return any(_PEER_LOST.search(line) for line in self.words[-8:])

    @property
    def how(self) -> str:
        """Its exit code in words."""
        if self.exit_code >= 0:
            is_evicted = self.exit_code == FencedError.EXIT_CODE
            return f"exit code {self.exit_code}{' (evicted: the others went on without it)' if is_evicted else ''}"
        why = " (by someone, or by the kernel for lack of memory: see its log, dmesg)"
        name = _NAMES.get(-self.exit_code, f"signal {-self.exit_code}")
        return f"killed by {name}{why if self.exit_code == -signal.SIGKILL else ''}"


def rank_end(rank: int, failure: ProcessFailure, stderr: str, *, was_running: bool = False) -> RankEnd:
    """Describe a failure by its error file, else by the end of its file ``stderr`` ("": there is none).

    ``was_running``: until the launcher ended the workers.
    """
    error_file, words, hint, failed_s, is_refused = Path(failure.error_file), "", "", time.time(), False
    if error_file.is_file():
        details = json.loads(error_file.read_text())["message"]["extraInfo"]
        words, hint, is_refused = details["py_callstack"], details.get("hint", ""), details.get("is_refused", False)
        failed_s = error_file.stat().st_mtime
    elif stderr:
        with open(stderr, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            words = file.read().decode(errors="replace")
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in words.splitlines()]
    headers = [index for index, line in enumerate(lines) if _HEADER.match(line)]
    if not error_file.is_file():
        lines = lines[headers[-1] if headers else -10 :]
    was_ended = was_running and -failure.exitcode in (signal.SIGTERM, signal.SIGKILL)
    return RankEnd(
        rank=rank,
        exit_code=failure.exitcode,
        failed_s=failed_s,
        was_ended=was_ended,
        words=tuple(lines),
        hint=hint,
        is_refused=is_refused,
    )


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that failed first: neither ended by the launcher nor, where another one failed, for want of a peer."""
    return min(ends, key=lambda end: (end.was_ended, end.lost_peer, end.failed_s), default=None)


def describe(ends: Sequence[RankEnd], left: Sequence[int] = ()) -> list[str]:
    """The report on ranks that failed together, of which those in ``left`` had ended with exit code 0 before."""
    first = first_failure(ends)
    if first is None:
        return []
    if first.lost_peer and left:
        last = f"{_ranks(left)} left in order (exit code 0), in the middle of a step; the others lost it:"
        return [last, *(f"  {_ranks([end.rank])}: {_last(end)}" for end in ends if end.lost_peer)]
    same = [end.rank for end in ends if first.words and _unnumbered(end) == _unnumbered(first)]
    who = f"{_ranks(same or [first.rank])} on {socket.gethostname()}"
    when = time.strftime("%H:%M:%S", time.localtime(first.failed_s))
    lines = [f"{who} failed{'' if len(same) > 1 else ' first'}, at {when}: {first.how}"]
    lines += [f"  {line}" for line in (*first.words, first.hint) if line]
    fates: dict[str, list[int]] = {}
    for end in ends:
        if end is not first and end.rank not in same:
            fate = "ended because of it" if end.was_ended else f"failed after it ({end.how}): {_last(end)}"
            fates.setdefault(fate, []).append(end.rank)
    return lines + [f"{_ranks(ranks)} {fate}" for fate, ranks in fates.items()]


def _unnumbered(end: RankEnd) -> list[str]:
    """Its words without its own number, which messages have; one that lists all ranks says on which it was seen."""
    own = rf"rank {end.rank}\b"
    seen_on = rf"seen on {own}"
    return [re.sub(seen_on if re.search(seen_on, line) else own, "this rank", line) for line in end.words]


def shell_status(exit_code: int) -> int:
    """The exit code with which a shell would report it: 128 + the signal's number."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _last(end: RankEnd) -> str:
    """Its error in one line."""
    said = [line.strip() for line in end.words if line.strip()]
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1] if said else end.how)


def _ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"
