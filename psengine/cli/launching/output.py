"""What workers write: shown at once behind the rank's name; the last lines of stderr are kept, with their times.

    worker ── stdout, stderr ──► named pipes ──► a thread for each ──┬─► "[rank 1] ..." on our stdout, stderr
                                                                     └─► the last lines of stderr

Named pipes, because torchrun's agent takes paths to redirect to. Unlike the log files that torchrun's ``--tee``
follows, a pipe shows a line when it is written, tells when that was, and fills no disk.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Container
from pathlib import Path
from typing import BinaryIO

KEPT_LINES = 400
_READ_BYTES = 65536
MAX_LINE_BYTES = 1 << 20
_POLL_S = 0.2
# A progress bar redraws its line many times a second; behind a rank's name it is shown this often.
REDRAW_S = 2.0
# How long to wait for the last lines of a process while a pager does not read our output.
DRAIN_S = 2.0
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_HEADER = "Traceback (most recent call last):"


class WorkerOutput:
    """Reads what workers write for as long as they run, because a full pipe would stop them.

    Args:
        directory: where the pipes are made.
        stdout, stderr: where the output is shown.
        title: what a rank is called before its lines: "rank", or "worker" where it is an independent one.
        plain_ranks: their output is passed on as it is; the lines of others are shown behind their rank.
        is_coloured: each rank's name has a colour.

    Attributes:
        hides_interrupts: after Ctrl-C: leave out the KeyboardInterrupt with which each rank ends.
    """

    def __init__(
        self,
        directory: Path,
        stdout: BinaryIO,
        stderr: BinaryIO,
        *,
        title: str = "rank",
        plain_ranks: Container[int] = (),
        is_coloured: bool = False,
    ) -> None:
        self.hides_interrupts = False
        self._directory = directory
        self._screens = (_Screen(stdout), _Screen(stderr))
        self._title = title
        self._plain_ranks = plain_ranks
        self._is_coloured = is_coloured
        self._numbers = itertools.count()
        self._streams: list[_Stream] = []
        self._stderrs: dict[int, _Stream] = {}

    def pipe(self, rank: int, *, is_stderr: bool, is_shown: bool = True) -> str:
        """Path of a new pipe for a worker's stream; a new stderr replaces the rank's former one."""
        path = self._directory / f"output-{next(self._numbers)}"
        os.mkfifo(path, 0o600)
        name = f"[{self._title} {rank}]"
        if self._is_coloured:
            name = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m"
        prefix = None if rank in self._plain_ranks else f"{name} ".encode()
        stream = _Stream(self, path, rank, self._screens[is_stderr] if is_shown else None, prefix, is_stderr=is_stderr)
        self._streams = [*(one for one in self._streams if one.is_alive()), stream]
        if is_stderr:
            self._stderrs[rank] = stream
        return str(path)

    def last_lines(self, rank: int) -> list[tuple[float, str]]:
        """The last lines of the stderr of a rank that has ended, with when they were read (``time.time()``)."""
        stream = self._stderrs.get(rank)
        if stream is None:
            return []
        stream.is_finishing = True
        stream.join(DRAIN_S)
        return list(stream.kept)

    def close(self, is_hurried: Callable[[], bool]) -> None:
        """Show the rest. Whoever reads our output has all the time it wants, until ``is_hurried``."""
        for stream in self._streams:
            stream.is_finishing = True
        for stream in self._streams:
            while stream.is_alive() and not is_hurried():
                stream.join(0.05)


class _Screen:
    """One of our own streams, shown to by any thread. When nobody reads it any more, output is dropped."""

    def __init__(self, target: BinaryIO) -> None:
        # Unbuffered: a thread that is left behind in a buffer's write would hold that buffer's lock at exit.
        self._target = getattr(target, "raw", target)
        self._lock = threading.Lock()
        self._is_broken = False
        # The last output ended in the middle of a line, as a progress bar does that is passed on as it is.
        self._is_line_open = False

    def show(self, data: bytes, *, is_line: bool = False) -> None:
        """Show bytes as they are, or a whole line, which begins on a new one."""
        with self._lock:
            if is_line and self._is_line_open:
                data = b"\n" + data
            self._is_line_open = not data.endswith(b"\n")
            remaining = memoryview(data)
            while remaining and not self._is_broken:
                try:
                    written = self._target.write(remaining)
                except (OSError, ValueError):
                    self._is_broken = True
                    return
                if written is None:  # a terminal that somebody made non-blocking, and that is full
                    time.sleep(0.01)
                remaining = remaining[written or 0 :]


class _Stream(threading.Thread):
    """One stream of one worker.

    ``prefix`` stands before each line; None: the bytes are passed on as they are. Without ``screen`` nothing is shown.
    """

    def __init__(
        self,
        output: WorkerOutput,
        path: Path,
        rank: int,
        screen: _Screen | None,
        prefix: bytes | None,
        *,
        is_stderr: bool,
    ) -> None:
        super().__init__(name=f"psengine-{path.name}", daemon=True)
        self.kept: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        # The process has ended: read what is there. Its children may keep the pipe open, and are not waited for.
        self.is_finishing = False
        self._output = output
        self._path = path
        # torch puts the rank before each line of a traceback.
        self._torch_name = b"[rank%d]: " % rank
        self._screen = screen
        self._is_stderr = is_stderr
        self._prefix = prefix
        self._pending = b""
        self._redrawn_s = 0.0
        self._held: list[bytes] = []
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.start()

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while True:
            is_last = self.is_finishing
            if poll.poll(0 if is_last else 1e3 * _POLL_S):
                data = os.read(self._descriptor, _READ_BYTES)
                if not data:
                    break
                self._take(data)
            elif is_last:
                break
        if self._pending:
            self._take_line(self._pending)
        for line in self._held:
            self._show(line)
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    @property
    def _is_plain(self) -> bool:
        return self._prefix is None and not self._output.hides_interrupts

    def _take(self, data: bytes) -> None:
        if self._is_plain and self._screen is not None:
            self._screen.show(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            lines, self._pending = [*lines, self._pending], b""
        for line in lines:
            self._take_line(line)
        if b"\r" in self._pending and time.monotonic() - self._redrawn_s > REDRAW_S:
            self._redrawn_s = time.monotonic()
            self._show(_last_drawn(self._pending.rpartition(b"\r")[0]))

    def _take_line(self, line: bytes) -> None:
        line = _last_drawn(line).removeprefix(self._torch_name)
        if not self._is_stderr:
            self._show(line)
            return
        text = line.decode(errors="replace")
        self.kept.append((time.time(), text))
        # After Ctrl-C a traceback is held back until it is known whether it is that of the KeyboardInterrupt.
        if self._held and text.startswith(" "):
            self._held.append(line)
        elif self._output.hides_interrupts and text.startswith(_HEADER):
            self._held = [line]
        elif self._held and text.rstrip() == "KeyboardInterrupt":
            self._held = []
        else:
            for one in (*self._held, line):
                self._show(one)
            self._held = []

    def _show(self, line: bytes) -> None:
        if self._screen is not None and not self._is_plain:
            self._screen.show((self._prefix or b"") + line + b"\n", is_line=True)


def _last_drawn(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
