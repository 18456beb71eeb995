"""Which elector the settings name."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psengine.parameter_server.server.replication.election import Elector, Leadership, Member, decode_leadership
from psengine.parameter_server.server.replication.succession import Succession
from psengine.parameter_server.server.settings import ServerSettings


class FileElector:
    """A stand-in: a file, and a lock for the leader's life."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lease = os.open(f"{path}.lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _take_lease(self) -> bool:
        try:
            fcntl.flock(self._lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _read(self) -> Leadership | None:
        if not self._path.exists():
            return None
        return decode_leadership(self._path.read_bytes(), str(self._path))

    def read(self) -> tuple[Leadership | None, bool]:
        with self._locked():
            is_free = self._take_lease()
            if is_free:
                fcntl.flock(self._lease, fcntl.LOCK_UN)
            return self._read(), not is_free

    def replace(self, old: Leadership | None, new: Leadership, *, takes_over: bool) -> bool:
        with self._locked():
            if self._read() != old or (takes_over and not self._take_lease()):
                return False
            self._path.write_bytes(new.encode())
            return True

    def renew(self) -> bool:
        return self._take_lease()

    def ask_to_end(self, leadership: Leadership) -> None:
        return None

    def close(self) -> None:
        os.close(self._lease)


def make_elector(settings: ServerSettings) -> Elector:
    """The one that the settings name."""
    return FileElector(Path((settings.election or "").partition("=")[2]))


def make_succession(settings: ServerSettings, own: Member) -> Succession:
    """Who decides what this server is."""
    return Succession(own, lease_s=settings.lease_s, follow=settings.follow or "")
