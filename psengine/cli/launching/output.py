"""What workers write: shown at once behind the rank's name; the last lines of stderr are kept, with their times.

    worker ── stdout, stderr ──► named pipes ──► a thread for each ──┬─► "[rank 1] ..." on our stdout, stderr
                                                                     └─► the last lines of stderr

Named pipes, because torchrun's agent takes paths to redirect to. Unlike log files that are followed, as torchrun's
``--tee`` follows them, a pipe shows a line when it is written, tells when that was, and fills no disk.
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
# ``python -u`` writes a line and its end one after the other.
_LINE_END_S = 0.005
# A progress bar redraws its line many times a second; with a rank's name before it, it is shown this often.
REDRAW_S = 2.0
# How long the last words of a process are waited for, while whoever reads our output (a pager) stands still.
DRAIN_S = 2.0
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_HEADER = "Traceback (most recent call last):"


class WorkerOutput:
    """Reads what workers write for as long as they run, because a full pipe would stop them.

    Args:
        directory: where the pipes are made.
        stdout, stderr: where the output is shown.
        plain_ranks: their output is passed on as it is; the lines of others are shown behind their rank.
        is_coloured: each rank's name has a colour.

    Attributes:
        hides_interrupts: Ctrl-C was passed on: the KeyboardInterrupt with which each rank ends is left out.
    """

    def __init__(
        self,
        directory: Path,
        stdout: BinaryIO,
        stderr: BinaryIO,
        *,
        plain_ranks: Container[int] = (),
        is_coloured: bool = False,
    ) -> None:
        self.hides_interrupts = False
        self._directory = directory
        self._screens = (_Screen(stdout), _Screen(stderr))
        self._plain_ranks = plain_ranks
        self._is_coloured = is_coloured
        self._numbers = itertools.count()
        self._streams: list[_Stream] = []
        self._stderrs: dict[int, _Stream] = {}

    def pipe(self, rank: int, *, is_stderr: bool, is_shown: bool = True) -> str:
        """Path of a new pipe for a worker's stream; a new stderr takes the place of the rank's former one."""
        path = self._directory / f"output-{next(self._numbers)}"
        os.mkfifo(path, 0o600)
        name = f"[rank {rank}]"
        if self._is_coloured:
            name = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m"
        stream = _Stream(
            self, path, rank, self._screens[is_stderr], is_stderr=is_stderr, is_shown=is_shown,
            prefix=None if rank in self._plain_ranks else f"{name} ".encode(),
        )  # fmt: skip
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
    """Where one of our own streams is shown; safe from any thread. Nobody may read it any more."""

    def __init__(self, target: BinaryIO) -> None:
        # Unbuffered: a thread that is left behind in a buffer's write would hold that buffer's lock at exit.
        self._target = getattr(target, "raw", target)
        self._lock = threading.Lock()
        self._is_broken = False
        # What is shown ends in the middle of a line: a progress bar that is passed on as it is.
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
                    self._is_broken = True  # whoever read it is gone; the workers go on
                    return
                if written is None:  # a terminal that somebody made non-blocking, and that is full
                    time.sleep(0.01)
                remaining = remaining[written or 0 :]


class _Stream(threading.Thread):
    """One stream of one worker. ``prefix`` stands before each line; None: the bytes are passed on as they are."""

    def __init__(
        self,
        output: WorkerOutput,
        path: Path,
        rank: int,
        screen: _Screen,
        *,
        is_stderr: bool,
        is_shown: bool,
        prefix: bytes | None,
    ) -> None:
        super().__init__(name=f"psengine-{path.name}", daemon=True)
        self.kept: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
        # The process has ended: read what is there, and do not wait for its children, which may have the pipe open.
        self.is_finishing = False
        self._output = output
        self._path = path
        # torch names the rank before each line of a traceback.
        self._torch_name = b"[rank%d]: " % rank
        self._screen = screen
        self._is_stderr = is_stderr
        self._is_shown = is_shown
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
            if not poll.poll(1e3 * _POLL_S if not is_last else 0):
                if is_last:
                    break
                continue
            data = os.read(self._descriptor, _READ_BYTES)
            if not data:
                break
            if self._is_plain and not data.endswith(b"\n") and poll.poll(1e3 * _LINE_END_S):
                data += os.read(self._descriptor, _READ_BYTES)
            self._take(data)
        if self._pending:
            self._take_line(_last_drawn(self._pending))
        for line in self._held:
            self._show(line)
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    @property
    def _is_plain(self) -> bool:
        return self._prefix is None and not self._output.hides_interrupts

    def _take(self, data: bytes) -> None:
        if self._is_plain and self._is_shown:
            self._screen.show(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            lines, self._pending = [*lines, self._pending], b""
        for line in lines:
            self._take_line(_last_drawn(line))
        if b"\r" in self._pending and time.monotonic() - self._redrawn_s > REDRAW_S:
            self._redrawn_s = time.monotonic()
            self._show(_last_drawn(self._pending.rpartition(b"\r")[0]))

    def _take_line(self, line: bytes) -> None:
        line = line.removeprefix(self._torch_name)
        if not self._is_stderr:
            self._show(line)
            return
        text = line.decode(errors="replace")
        self.kept.append((time.time(), text))
        if not self._output.hides_interrupts:
            self._show(line)
            return
        # A traceback is held back until it is known whether it is that of the KeyboardInterrupt.
        if self._held and text.startswith(" "):
            self._held.append(line)
        elif text.startswith(_HEADER):
            self._held = [line]
        elif text.rstrip() == "KeyboardInterrupt":
            self._held = []
        else:
            for one in (*self._held, line):
                self._show(one)
            self._held = []

    def _show(self, line: bytes) -> None:
        if self._is_shown and not self._is_plain:
            self._screen.show((self._prefix or b"") + line + b"\n", is_line=True)


def _last_drawn(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
