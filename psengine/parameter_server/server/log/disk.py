"""The disk under a server's log and snapshots: a daemon gives a directory, a simulation a disk of its own.

What is certain about a file: a ``sync`` that returned makes every earlier ``append`` durable; ``sync_names`` makes
durable which names there are in its directory: what was created, renamed and deleted. Everything else may be there
after a power loss, or not, or in part. A ``sync`` that failed says nothing about what is there, and must not be tried
again as if it did: Linux reports a failed write-back once, to the descriptors that are open then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

# Linux takes at most this many pieces in one call.
_MAX_PIECES = 1024


class DiskFile(Protocol):
    """A file that grows at its end."""

    def append(self, pieces: Sequence[Any]) -> None:
        """Write these bytes-like objects behind each other. After an error the next call writes to the same place.

        Raises:
            OSError: they were not written, or in part; ENOSPC where there is no room.
        """

    def sync(self) -> None:
        """Make durable what was appended.

        Raises:
            OSError: whether it is durable is not known, and never will be; or the file's name leads elsewhere now, so
                that nobody would find what was appended.
        """

    def close(self) -> None:
        """Release the file."""


class Disk(Protocol):
    """One directory; names are without slashes. Its ``str`` is what errors call it."""

    def list(self) -> list[str]:
        """The names in it."""

    def create(self, name: str) -> DiskFile:
        """Open a new, empty file; its name is durable after ``sync_names``."""

    def sync_names(self) -> None:
        """Make durable what was created, renamed and deleted."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, at once."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing where there is none."""

    def size_bytes(self, name: str) -> int:
        """Of a file."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """At most so many bytes of a file from ``offset`` on; fewer only at its end."""

    def free_bytes(self) -> int:
        """Room that is left."""


class DirectoryDisk:
    """A directory of the operating system.

    Raises:
        OSError: by every method, with the file's name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    def list(self) -> list[str]:
        return os.listdir(self.directory)

    def create(self, name: str) -> DirectoryFile:
        return DirectoryFile(self.directory / name)

    def sync_names(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(self.directory)
            raise
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.directory / old, self.directory / new)

    def delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)

    def size_bytes(self, name: str) -> int:
        return (self.directory / name).stat().st_size

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        with open(self.directory / name, "rb", buffering=0) as file:
            file.seek(offset)
            pieces = []
            while size_bytes and (piece := file.read(size_bytes)):
                pieces.append(piece)
                size_bytes -= len(piece)
        return b"".join(pieces)

    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize


class DirectoryFile:
    """A new file of a ``DirectoryDisk``."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = 0

    def append(self, pieces: Sequence[Any]) -> None:
        left, offset = [memoryview(piece).cast("B") for piece in pieces if len(piece)], self._end
        while left:
            try:
                written = os.pwritev(self._descriptor, left[:_MAX_PIECES], offset)
            except OSError as error:
                error.filename = self._path
                raise
            offset += written
            done = 0
            while done < len(left) and written >= len(left[done]):
                written -= len(left[done])
                done += 1
            left = left[done:]
            if written:
                left[0] = left[0][written:]
        self._end = offset

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                raise OSError(errno.ESTALE, "the file, or its directory, was replaced while it was written")
        except OSError as error:
            error.filename = self._path
            raise

    def close(self) -> None:
        os.close(self._descriptor)
