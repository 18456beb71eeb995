"""The directory of a server's snapshots and logs, which no other live server may have.

<directory>/lock     flock of the live server; its process id
<directory>/...      see ``generations.py``
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

from typing_extensions import override

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.snapshots.files import ServerState
from psengine.parameter_server.server.snapshots.generations import Generations

logger = logging.getLogger(__name__)


class SnapshotStore(Generations):
    """The generations in one directory of the operating system, for one server process.

    Args:
        directory: created if it is absent; its parent must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()
        super().__init__(DirectoryDisk(self.directory))
        self._lock: int | None = None

    def open(self) -> None:
        """Take the directory: lock it, see that it is writable, remove what killed writers left unfinished.

        Raises:
            SnapshotError: another live server has it, or it cannot be created or written to.
        """
        assert self._lock is None, "the store is open already"
        try:
            self._create_directory()
            self._lock = self._take_lock()
            self.begin()
        except OSError as error:
            self.close()
            raise SnapshotError(
                f"a snapshot directory must be writable, and its parent must exist (got {error.strerror}: "
                f"{error.filename or self.directory}); choose another one for {self.directory}"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the directory's lock; it also ends with the process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> SnapshotStore:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    @override
    def newest(self) -> int | None:
        try:
            return super().newest if self._is_ours() else None
        except FileNotFoundError:
            return None

    @override
    def save(self, state: ServerState) -> int:
        """See ``Generations``; SnapshotError also where the directory was replaced, and another server has it."""
        if not self._is_ours():
            try:
                lock = self._take_lock()
                self.close()
                self._lock = lock
                self.begin()
            except OSError as error:
                self.last += 1
                raise SnapshotError(self._write_failure(error, self.last)) from error
            logger.warning("%s was replaced while this server ran; it is locked anew", self.directory)
        return super().save(state)

    def path_of(self, generation: int) -> Path:
        """Its file."""
        return self.directory / f"generation-{generation:012d}"

    # ---- the directory ---------------------------------------------------------------------------------------------

    def _create_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700)
            DirectoryDisk(self.directory.parent).sync_names()

    def _take_lock(self) -> int:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except BaseException as error:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise SnapshotError(
                f"a snapshot directory belongs to one server (expected {self.directory} to be free, got a lock held by "
                f"process {holder}); stop that server, or choose another directory"
            ) from None
        return lock

    def _is_ours(self) -> bool:
        """Whether this process holds the lock of the directory's lock file."""
        assert self._lock is not None
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.directory / "lock"))
        except FileNotFoundError:
            return False
