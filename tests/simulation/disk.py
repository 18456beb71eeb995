"""A disk that outlives its server: what was not synced may be lost with the power, in part, and bits may flip."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ROOM_BYTES = 1 << 40


@dataclass
class _Content:
    """One file: its bytes, how many are durable, and whether its name is."""

    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0
    has_durable_name: bool = False


class SimulatedDisk:
    """``psengine.parameter_server.server.log.disk.Disk``.

    Attributes:
        problem: "fsync fails", "disk full", or "" where all is well.
    """

    def __init__(self, rng: random.Random) -> None:
        self.problem = ""
        self._rng = rng
        self._files: dict[str, _Content] = {}
        self._deleted: dict[str, _Content] = {}  # since names were synced

    def list(self) -> list[str]:
        return sorted(self._files)

    def create(self, name: str) -> SimulatedFile:
        if name in self._files:
            raise FileExistsError(errno.EEXIST, "exists", name)
        self._deleted.pop(name, None)
        content = self._files[name] = _Content()
        return SimulatedFile(self, name, content)

    def sync_names(self) -> None:
        self.check(errno.EIO, "fsync fails")
        self._deleted.clear()
        for content in self._files.values():
            content.has_durable_name = True

    def delete(self, name: str) -> None:
        content = self._files.pop(name, None)
        if content is not None and content.has_durable_name:
            self._deleted[name] = content

    def size_bytes(self, name: str) -> int:
        return len(self._files[name].data)

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        return bytes(self._files[name].data[offset : offset + size_bytes])

    def free_bytes(self) -> int:
        return 0 if self.problem == "disk full" else ROOM_BYTES

    def check(self, number: int, problem: str) -> None:
        """Raise OSError where the disk has this problem."""
        if self.problem == problem:
            raise OSError(number, problem)

    # ---- faults ------------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Of what was not synced, nothing is left, or some, or all of it torn at its end."""
        rng = self._rng
        for name, content in list(self._files.items()):
            if not content.has_durable_name and rng.random() < 0.5:
                del self._files[name]
                continue
            rest = len(content.data) - content.synced_bytes
            kept = content.synced_bytes + (rng.randint(0, rest) if rest and rng.random() < 0.7 else 0)
            del content.data[kept:]
            if kept > content.synced_bytes and rng.random() < 0.3:
                # The file's length was written, and its last block was not.
                zeros = rng.randint(1, kept - content.synced_bytes)
                content.data[-zeros:] = bytes(zeros)
        for name, content in self._deleted.items():
            if rng.random() < 0.5 and name not in self._files:
                self._files[name] = content
        self._deleted.clear()
        for content in self._files.values():
            content.synced_bytes, content.has_durable_name = len(content.data), True

    def flip_bit(self) -> bool:
        """One bit of one file becomes another; whether there was any."""
        names = [name for name in self.list() if self._files[name].data]
        if not names:
            return False
        data = self._files[self._rng.choice(names)].data
        place = self._rng.randrange(len(data) * 8)
        data[place // 8] ^= 1 << place % 8
        return True

    def clear(self) -> None:
        """An empty disk."""
        self._files.clear()
        self._deleted.clear()


class SimulatedFile:
    """A file of a ``SimulatedDisk``."""

    def __init__(self, disk: SimulatedDisk, name: str, content: _Content) -> None:
        self._disk, self._name, self._content = disk, name, content
        self._end = 0

    def append(self, pieces: Sequence[Any]) -> None:
        data = b"".join(bytes(piece) for piece in pieces)
        kept = self._content.data
        if self._disk.problem == "disk full":
            kept[self._end :] = data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no room", self._name)
        kept[self._end :] = data
        self._end += len(data)

    def sync(self) -> None:
        self._disk.check(errno.EIO, "fsync fails")
        self._content.synced_bytes = len(self._content.data)

    def close(self) -> None:
        """Nothing to release."""
