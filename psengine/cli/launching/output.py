"""What workers write: shown at once behind the rank's name, and the end of stderr kept.

    worker ── stdout, stderr ──► named pipes ──► one thread here ──┬─► "[rank 1] ..." on our stdout, stderr
                                                                   └─► the last lines of stderr, with their times

Named pipes, because torchrun's agent takes paths to redirect to; unlike files that are polled they show a line when it
is written, and say when that was.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from psengine.cli.launching.interrupt_filter import InterruptFilter

KEPT_LINES = 400
_READ_BYTES = 65536
_LONGEST_LINE_BYTES = 1 << 20
# What a pipe may hold at most (pipe-max-size); a process that writes without end has no rest.
_REST_BYTES = 1 << 20
_FULL_S = 0.01
# ``python -u`` writes a line and its end one after the other; nobody else's line is to come between.
_LINE_END_S = 0.005
# A progress bar redraws its line many times a second; of several ranks' one drawing in so long is shown.
REDRAW_S = 2.0
# Whoever reads our output may stand still (a pager): so long is waited for what a process wrote last, ...
DRAIN_S = 2.0
# ... and so long, after a signal, for the rest. Without a signal the reader has all the time it wants.
CLOSE_S = 5.0
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


@dataclass
class _Stream:
    rank: int
    is_stderr: bool
    is_shown: bool
    is_plain: bool
    file: Path
    descriptor: int
    # The last lines of a stderr.
    kept: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    # Nobody has it open for writing any more, and nobody will.
    has_ended: bool = False
    pending: bytes = b""
    # Of a plain stream's pending line, what was passed on already.
    passed_bytes: int = 0
    redrawn_s: float = -REDRAW_S
    interrupt: InterruptFilter = field(default_factory=InterruptFilter)


class WorkerOutput:
    """Reads what workers write, for as long as they run: a full pipe would stop them. A context manager.

    Args:
        directory: where the pipes are made.
        stdout, stderr: where it is shown.
        plain_ranks: their bytes are passed on as they are; others' lines are shown behind their rank.
        is_coloured: each rank's name has its colour.
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
        self._directory = directory
        # Unbuffered: a thread that is left behind in a buffer's write would hold that buffer's lock at exit.
        self._targets = tuple(getattr(target, "raw", target) for target in (stdout, stderr))
        self._plain_ranks = plain_ranks
        self._is_coloured = is_coloured
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # of the selector's map and of what is kept; never held while showing
        self._count = 0
        # By target: whether what is shown ends in the middle of a line.
        self._is_line_open = [False, False]
        # Of each rank: its stdout and its stderr.
        self._streams: dict[tuple[int, bool], _Stream] = {}
        self._replaced: deque[_Stream] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._drains: deque[threading.Event] = deque()
        self._is_closing = False
        self._hurried_s: float | None = None
        self._is_abandoned = threading.Event()
        self._broken: set[bool] = set()
        self._is_interrupted = False
        self._thread = threading.Thread(target=self._read_all, name="psengine-worker-output", daemon=True)
        self._thread.start()

    def __enter__(self) -> WorkerOutput:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def pipe(self, rank: int, *, is_stderr: bool, is_shown: bool = True) -> str:
        """Path of a new pipe for a worker's stream; takes the place of the rank's former one.

        A new stderr forgets what the former one said. A former pipe is closed when its last writer is gone: a worker's
        own children may outlive it.
        """
        with self._lock:
            self._count += 1
            path = self._directory / f"output-{self._count}"
            os.mkfifo(path, 0o600)
            # Open for both, it neither waits for a writer nor ends with one.
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            stream = _Stream(rank, is_stderr, is_shown, rank in self._plain_ranks, path, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, stream)
            former = self._streams.get((rank, is_stderr))
            self._streams[rank, is_stderr] = stream
        if former is not None:
            self._replaced.append(former)
            self._wake()
        return str(path)

    def expect_interrupts(self) -> None:
        """Ctrl-C was passed on: leave out the KeyboardInterrupt with which each rank ends."""
        self._is_interrupted = True

    def hurry(self) -> None:
        """A signal asked for the end: ``close`` does not wait longer than ``CLOSE_S``."""
        self._hurried_s = time.monotonic()

    def abandon(self) -> None:
        """Whoever reads our output is not waited for any more."""
        self._is_abandoned.set()

    def stderr_of(self, rank: int) -> list[tuple[float, str]]:
        """The last lines of a rank's stderr, with when they were read (``time.time()``)."""
        with self._lock:
            stream = self._streams.get((rank, True))
            return [] if stream is None else list(stream.kept)

    def drain(self) -> None:
        """Read what is there now, whatever a process wrote before it ended; not where our own reader stands still."""
        drained = threading.Event()
        self._drains.append(drained)
        self._wake()
        deadline_s = time.monotonic() + DRAIN_S
        while not drained.wait(0.05) and time.monotonic() < deadline_s:
            if self._is_abandoned.is_set() or not self._thread.is_alive():
                return

    def close(self) -> None:
        """Show the rest and end. Safe twice."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake()
        begin_s = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.05)
            hurried_s = self._hurried_s
            is_late = hurried_s is not None and time.monotonic() > max(begin_s, hurried_s) + CLOSE_S
            if is_late or self._is_abandoned.is_set():
                return  # the thread stands in a write, and ends with this process
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _wake(self) -> None:
        os.write(self._wake_writer, b"x")

    def _read_all(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(1.0):
                if key.data is not None:
                    self._read(key.data)
                    if key.data.has_ended:
                        self._drop(key.data)
                    continue
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 64)
                while self._replaced:
                    self._await_end(self._replaced.popleft())
                while self._drains:
                    drained = self._drains.popleft()
                    self._read_rest()
                    drained.set()
        for stream in self._read_rest():
            self._finish(stream)

    def _await_end(self, stream: _Stream) -> None:
        """Keep a pipe that was replaced as a mere reader: then it tells when its last writer is gone."""
        try:
            reader = os.open(stream.file, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return  # it stays open, until the end
        with self._lock:
            self._selector.unregister(stream.descriptor)
            os.close(stream.descriptor)
            stream.descriptor = reader
            self._selector.register(reader, selectors.EVENT_READ, stream)

    def _drop(self, stream: _Stream) -> None:
        with self._lock:
            self._selector.unregister(stream.descriptor)
        self._finish(stream)

    def _read_rest(self) -> list[_Stream]:
        with self._lock:
            streams = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for stream in streams:
            for _ in range(_REST_BYTES // _READ_BYTES):
                if not self._read(stream):
                    break
        return streams

    def _read(self, stream: _Stream) -> bool:
        try:
            data = os.read(stream.descriptor, _READ_BYTES)
        except (BlockingIOError, OSError):
            return False
        if not data:
            stream.has_ended = True
            return False
        now = time.time()
        is_passed = stream.is_plain and stream.is_shown and not self._is_interrupted
        if is_passed:
            if not data.endswith((b"\n", b"\r")):
                data += _read_soon(stream.descriptor)
            self._show(stream, data)
        stream.pending += data
        *lines, stream.pending = stream.pending.split(b"\n")
        for line in lines:
            self._take(stream, line, now)
        if len(stream.pending) > _LONGEST_LINE_BYTES:
            self._take(stream, stream.pending, now)
            stream.pending = b""
        elif b"\r" in stream.pending and not stream.is_plain:
            # A line that is drawn again and again: only its newest state matters.
            drawn, _, stream.pending = stream.pending.rpartition(b"\r")
            if drawn.strip(b"\r") and now - stream.redrawn_s >= REDRAW_S:
                stream.redrawn_s = now
                self._show_line(stream, drawn.rstrip(b"\r").rpartition(b"\r")[2])
        if is_passed:
            stream.passed_bytes = len(stream.pending)
        return True

    def _take(self, stream: _Stream, line: bytes, now: float) -> None:
        rest, stream.passed_bytes = line[stream.passed_bytes :], 0
        # torch names the rank before each line of a traceback; we do.
        name = b"[rank%d]: " % stream.rank
        shown = rest if stream.is_plain else _last_drawn(line).removeprefix(name)
        if not stream.is_stderr:
            self._show_line(stream, shown)
            return
        kept = _last_drawn(line).removeprefix(name).decode(errors="replace")
        with self._lock:
            stream.kept.append((now, kept))
        shown_lines = stream.interrupt.take(kept, shown) if self._is_interrupted else [shown]
        for one in shown_lines:
            self._show_line(stream, one)

    def _finish(self, stream: _Stream) -> None:
        if stream.pending:
            self._take(stream, stream.pending, time.time())
        for line in stream.interrupt.finish():
            self._show_line(stream, line)
        os.close(stream.descriptor)
        stream.file.unlink(missing_ok=True)

    def _show_line(self, stream: _Stream, line: bytes) -> None:
        if stream.is_shown and (not stream.is_plain or self._is_interrupted):
            # Behind a progress bar, say, that is drawn as it is.
            new_line = b"\n" if self._is_line_open[stream.is_stderr] and not stream.is_plain else b""
            self._show(stream, new_line + self._prefix(stream) + line + b"\n")

    def _prefix(self, stream: _Stream) -> bytes:
        if stream.is_plain:
            return b""
        name = f"[rank {stream.rank}]"
        colour = _COLOURS[stream.rank % len(_COLOURS)]
        return (f"\x1b[{colour}m{name}\x1b[0m " if self._is_coloured else f"{name} ").encode()

    def _show(self, stream: _Stream, data: bytes) -> None:
        self._is_line_open[stream.is_stderr] = not data.endswith(b"\n")
        remaining = memoryview(data)
        while remaining and stream.is_stderr not in self._broken and not self._is_abandoned.is_set():
            try:
                written = self._targets[stream.is_stderr].write(remaining)
                if written is None:  # a terminal that somebody made non-blocking, and that is full
                    time.sleep(_FULL_S)
                remaining = remaining[written or 0 :]
            except (OSError, ValueError):
                self._broken.add(stream.is_stderr)  # whoever read it is gone; the workers go on


def _read_soon(descriptor: int) -> bytes:
    """What follows at once, if anything does."""
    soon = select.poll()  # unlike select(), takes descriptors beyond 1024
    soon.register(descriptor, select.POLLIN)
    try:
        return os.read(descriptor, _READ_BYTES) if soon.poll(1e3 * _LINE_END_S) else b""
    except OSError:
        return b""


def _last_drawn(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
