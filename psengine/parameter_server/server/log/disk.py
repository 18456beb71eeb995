"""The disk under a server's log and snapshots: a daemon gives a directory, a simulation a disk of its own.

What is certain about a file: a ``sync`` that returned makes every earlier ``append`` durable, ``commit`` its name too.
Everything else may be there after a power loss, or not, or in part. A ``sync`` that failed says nothing about what is
there, and must not be tried again as if it did: Linux reports a failed write-back once, to the descriptors that are
open then.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from psengine.errors import SnapshotError

# What a file's name begins with until it is committed.
UNFINISHED = "unfinished-"
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Linux takes at most this many pieces in one call.
_MAX_PIECES = 1024


class DiskFile(Protocol):
    """A file that grows at its end."""

    def append(self, pieces: Sequence[Any]) -> None:
        """Write these bytes-like objects behind each other. After an error the next call writes to the same place.

        Raises:
            OSError: they were not written, or in part; one of ``FULL_ERRORS`` where there is no room.
        """

    def sync(self) -> None:
        """Make durable what was appended.

        Raises:
            OSError: whether it is durable is not known, and never will be; or the file's name leads elsewhere now, so
                that nobody would find what was appended. None of ``FULL_ERRORS``.
        """

    def commit(self) -> None:
        """Sync, and give the file its name, which is durable then; errors as ``sync``."""

    def close(self) -> None:
        """Release the file; one that was not committed goes."""


class Disk(Protocol):
    """One directory; names are without slashes. Its ``str`` is what errors call it."""

    def lock(self) -> None:
        """Take it for this process, until ``unlock``.

        Raises:
            SnapshotError: another process has it.
        """

    def list(self) -> list[str]:
        """The names in it."""

    def create(self, name: str) -> DiskFile:
        """Open a new, empty file, which has this name once it is committed."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing where there is none."""

    def size_bytes(self, name: str) -> int:
        """Of a file."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        """At most so many bytes of a file from ``offset`` on; fewer only at its end."""

    def free_bytes(self) -> int:
        """Room that is left."""


def check_link(directory: Path) -> None:
    """Raise SnapshotError where a folder for snapshots, or one that it lies in, is a link to nothing."""
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            raise SnapshotError(
                f"--snapshot-dir {directory} leads through a link to nothing (expected {path} to lead to a folder, got"
                f" {os.readlink(path)}, which is not there). Fix: mount or make that folder, or remove the link."
            )


class DirectoryDisk:
    """A directory of the operating system.

    Raises:
        OSError: by every method, with the file's name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()
        self._lock: int | None = None

    def __str__(self) -> str:
        return str(self.directory)

    def make(self) -> None:
        """Make the directory if it is absent; its parent must exist."""
        check_link(self.directory)
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700)
            _sync_names(self.directory.parent)

    def lock(self) -> None:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise SnapshotError(
                f"a snapshot directory belongs to one server (expected {self.directory} to be free, got a lock held by "
                f"process {holder}); stop that server, or choose another directory"
            ) from None
        self.unlock()
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        """Release it; it also ends with the process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def list(self) -> list[str]:
        return os.listdir(self.directory)

    def create(self, name: str) -> DirectoryFile:
        return DirectoryFile(self.directory, name)

    def delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)

    def size_bytes(self, name: str) -> int:
        return (self.directory / name).stat().st_size

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        with open(self.directory / name, "rb") as file:
            file.seek(offset)
            return file.read(size_bytes)

    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize


class DirectoryFile:
    """A new file of a ``DirectoryDisk``."""

    def __init__(self, directory: Path, name: str) -> None:
        self._complete = directory / name
        self._path = directory / (UNFINISHED + name)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._is_committed = False

    def append(self, pieces: Sequence[Any]) -> None:
        offset, path = self._end, str(self._path)
        for first in range(0, len(pieces), _MAX_PIECES):
            some = pieces[first : first + _MAX_PIECES]
            try:
                written = os.pwritev(self._descriptor, some, offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error
            if written != sum(map(len, some)):
                raise OSError(errno.ENOSPC, "there was room for a part only", path)
            offset += written
        self._end = offset

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                raise OSError(errno.ESTALE, "the file, or its directory, was replaced while it was written")
        except OSError as error:
            raise _not_durable(error, self._path) from error

    def commit(self) -> None:
        self.sync()
        try:
            os.rename(self._path, self._complete)
            self._path = self._complete
            _sync_names(self._path.parent)
        except OSError as error:
            raise _not_durable(error, self._path.parent) from error
        self._is_committed = True

    def close(self) -> None:
        os.close(self._descriptor)
        if not self._is_committed:
            with suppress(OSError):
                self._path.unlink()


def _not_durable(error: OSError, path: Path) -> OSError:
    return OSError(errno.EIO, f"it could not be made durable: {error.strerror}", str(path))


def _sync_names(directory: Path) -> None:
    """Make durable what was created, renamed and deleted there."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
