"""An elector in a file: of a launcher, for servers of one machine.

::

    PATH        the record: replaced under a lock of PATH.lock, and durable before the answer
    PATH.lease  locked by the leader as long as its process lives: the kernel releases it, after SIGKILL too
    PATH.end    the record whose leader a follower asks to end: for the launcher, which kills and reaps it
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from psengine.parameter_server.server.log.disk import UNFINISHED, DirectoryDisk
from psengine.parameter_server.server.replication.election import ElectorError, Leadership, decode_leadership

# For the lock, which others have while they replace the record.
TIMEOUT_S = 5.0


class FileElector:
    """See ``Elector``; used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._disk = DirectoryDisk(self._path.parent)
        self._lease: int | None = None

    def read(self) -> tuple[Leadership | None, bool]:
        """The record, and whether anybody has the lease."""
        with self._locked():
            is_free = self._take_lease()
            if is_free:
                self.close()
            return self._record(), not is_free

    def replace(self, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        """Under the lock of all."""
        with self._locked():
            if self._record() != old or (takes_over and not self._take_lease()):
                return False
            unfinished = UNFINISHED + self._path.name
            self._disk.delete(unfinished)  # of a process that was killed here
            with closing(self._disk.create(self._path.name)) as file:
                file.append([new.encode()])
                file.commit()
        return True

    def renew(self) -> bool:
        """It does not end while the process lives."""
        return self._lease is not None

    def ask_to_end(self, leadership: Leadership) -> None:
        """For the launcher, which looks for it."""
        with self._locked():
            Path(f"{self._path}.end").write_bytes(leadership.encode())

    def to_end(self) -> Leadership | None:
        """The record, where its leader is to be ended; for the launcher."""
        with self._locked(), suppress(FileNotFoundError):
            record = self._record()
            if record is not None and Path(f"{self._path}.end").read_bytes() == record.encode():
                return record
        return None

    def close(self) -> None:
        """Release the lease."""
        if self._lease is not None:
            os.close(self._lease)
            self._lease = None

    def _record(self) -> Leadership | None:
        try:
            return decode_leadership(self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            return None

    def _take_lease(self) -> bool:
        """False where somebody has it, also this process."""
        if self._lease is not None:
            return False
        self._lease = _lock(f"{self._path}.lease", 0.0)
        return self._lease is not None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            if (lock := _lock(f"{self._path}.lock", TIMEOUT_S)) is None:
                raise TimeoutError(f"another process has locked {self._path}.lock")
            try:
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise ElectorError(
                f"{self._path} cannot be read or replaced (expected a file in a folder of this user, locked for less"
                f" than {TIMEOUT_S:g} s, got {error}). Fix: see who has it, and what its disk has"
            ) from error


def _lock(path: str, timeout_s: float) -> int | None:
    """A descriptor that has the file's lock; None where another one has it."""
    descriptor, deadline_s = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                return None
            time.sleep(0.01)
