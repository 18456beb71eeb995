"""A disk that outlives its server: what was not synced may be lost with the power, in part, and bits may flip."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.parameter_server.server.log.disk import UNFINISHED

ROOM_BYTES = 1 << 40


class Killed(BaseException):
    """The process that writes has died; it does nothing any more, not even what it does about errors."""


@dataclass(eq=False)
class _File:
    """Its bytes, and how many of them are durable.

    What an fsync that failed should have written no later one writes, though it is read until the power goes.
    """

    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)

    def lose_power(self, rng: random.Random) -> None:
        """Of what was not synced, nothing is left, or some, or all of it torn at its end."""
        for first, last in self.holes:
            self.data[first:last] = bytes(last - first)
        self.holes.clear()
        rest = len(self.data) - self.synced_bytes
        kept = self.synced_bytes + (rng.randint(0, rest) if rest and rng.random() < 0.7 else 0)
        del self.data[kept:]
        if kept > self.synced_bytes and rng.random() < 0.3:
            # The file's length was written, and its last block was not.
            zeros = rng.randint(1, kept - self.synced_bytes)
            self.data[-zeros:] = bytes(zeros)
        self.synced_bytes = len(self.data)


_Names = dict[str, _File]


def _removes(name: str) -> Callable[[_Names], None]:
    def remove(names: _Names) -> None:
        names.pop(name, None)

    return remove


@dataclass(eq=False)
class _State:
    """What is wrong with a disk, or with who writes to it.

    Attributes:
        problem: "fsync fails", "disk full", or "" where all is well.
        calls_left: after so many calls that change something the process dies; None: it lives.
    """

    problem: str = ""
    calls_left: int | None = None


class SimulatedDisk:
    """``psengine.parameter_server.server.log.disk.Disk``.

    What is in it; what is in it for certain, and the changes since, of which a loss of power leaves some.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self.state = rng, _State()
        self._names: _Names = {}
        self._durable: _Names = {}
        self._changes: list[Callable[[_Names], None]] = []

    def __str__(self) -> str:
        return "the simulated disk"

    def _file(self, name: str) -> _File:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self._names[name]

    def _change(self, change: Callable[[_Names], None]) -> None:
        change(self._names)
        self._changes.append(change)

    def list(self) -> list[str]:
        return sorted(self._names)

    def lock(self) -> None:
        """Nobody else has it."""

    def create(self, name: str) -> SimulatedFile:
        self.begin_call()
        unfinished, content = UNFINISHED + name, _File()
        if unfinished in self._names:
            raise FileExistsError(errno.EEXIST, "exists", unfinished)
        self._change(lambda names: names.update({unfinished: content}))
        return SimulatedFile(self, name, content)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, at once."""
        self.begin_call()
        self._change(lambda names: names.update({new: names.pop(old)}) if old in names else None)

    def delete(self, name: str) -> None:
        self.begin_call()
        self._change(_removes(name))

    def sync_names(self) -> None:
        """Make durable what was created, renamed and deleted."""
        self.begin_call()
        self.check(errno.EIO, "fsync fails")
        self._durable, self._changes = dict(self._names), []

    def size_bytes(self, name: str) -> int:
        return len(self._file(name).data)

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        return bytes(self._file(name).data[offset : offset + size_bytes])

    def free_bytes(self) -> int:
        return 0 if self.state.problem == "disk full" else ROOM_BYTES

    def begin_call(self) -> None:
        """A call that changes something: raise Killed where the process has died."""
        left = self.state.calls_left
        if left is not None:
            if left <= 0:
                raise Killed
            self.state.calls_left = left - 1

    def check(self, number: int, problem: str) -> None:
        """Raise OSError where the disk has this problem."""
        if self.state.problem == problem:
            raise OSError(number, problem)

    # ---- faults ------------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Lose some of what was not synced."""
        names = dict(self._durable)
        for change in self._changes:
            if self._rng.random() < 0.5:
                change(names)
        self._names, self._durable, self._changes = names, dict(names), []
        for _, content in sorted(names.items()):
            content.lose_power(self._rng)

    def flip_bit(self, last_bytes: int | None = None) -> str:
        """One bit of one file, or of its last bytes, becomes another; the file's name, "" where there is none."""
        files = [(name, content) for name, content in sorted(self._names.items()) if content.data]
        if not files:
            return ""
        name, content = self._rng.choice(files)
        first = 0 if last_bytes is None else max(0, len(content.data) - last_bytes)
        place = self._rng.randrange(8 * first, 8 * len(content.data))
        content.data[place // 8] ^= 1 << place % 8
        return name

    def clear(self) -> None:
        """An empty disk."""
        self._names, self._durable, self._changes = {}, {}, []


class SimulatedFile:
    """A file of a ``SimulatedDisk``."""

    def __init__(self, disk: SimulatedDisk, name: str, content: _File) -> None:
        self._disk, self._name, self._content = disk, name, content
        self._end = 0
        self._is_committed = False

    def append(self, pieces: Sequence[Any]) -> None:
        self._disk.begin_call()
        data = b"".join(pieces)
        kept = self._content.data
        if self._disk.state.problem == "disk full":
            kept[self._end :] = data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no room", self._name)
        kept[self._end :] = data
        self._end += len(data)

    def sync(self) -> None:
        self._disk.begin_call()
        content = self._content
        first, content.synced_bytes = content.synced_bytes, len(content.data)
        try:
            self._disk.check(errno.EIO, "fsync fails")
        except OSError:
            content.holes.append((first, content.synced_bytes))
            raise

    def commit(self) -> None:
        self.sync()
        self._disk.rename(UNFINISHED + self._name, self._name)
        try:
            self._disk.sync_names()
        except OSError:
            self._disk.delete(self._name)
            raise
        self._is_committed = True

    def close(self) -> None:
        if not self._is_committed:
            self._disk.delete(UNFINISHED + self._name)
