"""Durable generations of a server process's state. A generation has all shards, so that they agree with each other.

generation-000000000012     complete, or it would not have this name; see ``files.py``
unfinished-000000000013     being written and fsynced; a rename makes it generation 13: the commit point
log-000-000000000003        see ``log/``; kept as long as a generation that is kept goes on in it, or before it
lock                        of a directory: flock of the live server; its process id
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from typing_extensions import override

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import DirectoryDisk, Disk
from psengine.parameter_server.server.log.log import Place, segment_name, segments
from psengine.parameter_server.server.snapshots.files import (
    DamagedFileError,
    ServerState,
    read_generation,
    read_places,
    write_generation,
)

logger = logging.getLogger(__name__)

KEPT = 2
# With less room than this, only the newest is kept of generations from which a log goes on: the log is what needs room.
LOW_BYTES = 1 << 30
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Of a generation, beside its tensors: what describes a chunk.
_CHUNK_BYTES = 4096
_GENERATION = re.compile(r"generation-(\d{12})")
_UNFINISHED = re.compile(r"unfinished-(\d{12})")


@dataclass(frozen=True)
class Loaded:
    """A generation that was read.

    Attributes:
        generation: its number.
        state: as it was saved.
        notes: newer generations that were skipped, each naming a file and what is wrong with it.
    """

    generation: int
    state: ServerState
    notes: list[str] = field(default_factory=list)


class Generations:
    """Those on one disk; written by one server process, and used by one thread at a time.

    The newest ``KEPT`` intact ones are kept. The disk must hold one more: a new one is complete before the oldest goes.
    Where it does not, one goes before.

    Attributes:
        disk: the directory that they are in.
        last: the highest number that was used, here or before.
        needed_bytes: room that the next one needs, as far as the last one tells.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.last = 0
        self.needed_bytes = 0
        self._damaged: set[int] = set()  # generations that could not be read: nothing to fall back on

    def begin(self) -> None:
        """Before the first ``save``: go on with the numbers, remove what killed writers left, see that it is writable.

        Raises:
            OSError: nothing can be written.
        """
        unfinished = self._numbers(_UNFINISHED)
        self.last = max([self.last, *self.numbers(), *unfinished])
        for number in unfinished:
            self.disk.delete(_name("unfinished", number))
        # An old file can be opened where nothing new can be created.
        self.disk.create(_name("unfinished", 0)).close()
        self.disk.delete(_name("unfinished", 0))

    # ---- what is there ---------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Numbers of those that are there, ascending; without a look at what is in them."""
        return sorted(self._numbers(_GENERATION))

    @property
    def newest(self) -> int | None:
        """Number of the newest that is not known to be damaged; None without one.

        Raises:
            OSError: the disk cannot be read now.
        """
        return max(set(self.numbers()) - self._damaged, default=None)

    def load(self) -> Loaded | None:
        """Read the newest generation that is intact; None if there is none at all.

        Raises:
            SnapshotError: there are generations, and none is intact.
        """
        notes: list[str] = []
        for generation in reversed(self.numbers()):
            try:
                state = read_generation(self.disk, _name("generation", generation), generation)
            except (DamagedFileError, OSError) as error:
                self._damaged.add(generation)
                notes.append(f"generation {generation} is skipped: {error}")
            else:
                return Loaded(generation, state, notes)
        if not notes:
            return None
        fix = "put a copy of a generation back, or choose another directory to start without a snapshot"
        raise SnapshotError("\n".join([f"no snapshot in {self.disk} can be read:", *notes, fix]))

    def places(self, generation: int) -> dict[int, Place]:
        """Where each shard's log goes on from it.

        Raises:
            OSError, DamagedFileError: it cannot be read.
        """
        return read_places(self.disk, _name("generation", generation), generation)

    # ---- writing ---------------------------------------------------------------------------------------------------

    def save(self, state: ServerState) -> int:
        """Write one generation, durable when this returns; remove the oldest, and the log before them; the new number.

        Raises:
            SnapshotError: it was not written, and no part of it is left; the message says which older generation is
                still there.
        """
        # A failed attempt's number and files are not used again: a page that could not be written may look clean
        # afterwards (PostgreSQL's "fsyncgate").
        self.last += 1
        chunks = [chunk for jobs in state.shards for job in jobs for chunk in job.chunks]
        self.needed_bytes = sum(chunk.size_bytes + _CHUNK_BYTES for chunk in chunks) + _CHUNK_BYTES
        try:
            if self.disk.free_bytes() < self.needed_bytes:
                self._prune(1, state.places)
            self._write(self.last, state)
            is_low = state.places and self.disk.free_bytes() < LOW_BYTES
        except OSError as error:
            raise SnapshotError(self._write_failure(error)) from error
        self._prune(1 if is_low else KEPT, state.places)
        return self.last

    def _write(self, generation: int, state: ServerState) -> None:
        name, complete = _name("unfinished", generation), _name("generation", generation)
        try:
            with closing(self.disk.create(name)) as file:
                write_generation(file, generation, state)
            self.disk.rename(name, complete)
            name = complete
            self.disk.sync_names()
        except BaseException:
            self._delete(name)
            raise

    def _write_failure(self, error: OSError) -> str:
        text = f"snapshot generation {self.last} was not written: {error.strerror} ({error.filename or self.disk}"
        durable = "whether an older one is there cannot be seen now"
        with suppress(OSError):
            if error.errno in FULL_ERRORS:
                text += f"; expected room for {self.needed_bytes} bytes, got {self.disk.free_bytes()} free"
            older = self.newest
            durable = "there is no older one" if older is None else f"generation {older} stays durable"
        return f"{text}); {durable}"

    def _prune(self, kept: int, places: dict[int, Place]) -> None:
        """Delete all but the newest intact generations, and segments that neither they nor ``places`` need."""
        try:
            intact = [number for number in self.numbers() if number not in self._damaged][-kept:]
            for number in self.numbers():
                if intact and number < intact[0]:
                    self._delete(_name("generation", number))
            needed = [places, *map(self.places, intact)]
            for shard, numbers in segments(self.disk).items() if intact else ():
                first = min((one[shard].segment for one in needed if shard in one), default=numbers[-1] + 1)
                for number in numbers:
                    if number < first:
                        self._delete(segment_name(shard, number))
        except (OSError, SnapshotError) as error:
            logger.warning("old generations, or segments of the log, in %s cannot be deleted: %s", self.disk, error)

    def _delete(self, name: str) -> None:
        try:
            self.disk.delete(name)
        except OSError as error:
            logger.warning("%s/%s could not be removed: %s", self.disk, name, error)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        return [int(match[1]) for match in map(pattern.fullmatch, self.disk.list()) if match]


class SnapshotStore(Generations):
    """The generations in one directory of the operating system, for one server process.

    Args:
        directory: created if it is absent; its parent must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        super().__init__(DirectoryDisk(self.directory))
        self._lock: int | None = None

    def open(self) -> None:
        """Take the directory: lock it, see that it is writable, remove what killed writers left unfinished.

        Raises:
            SnapshotError: another live server has it, or it cannot be created or written to.
        """
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(mode=0o700)
                DirectoryDisk(self.directory.parent).sync_names()
            self._lock = self._take_lock()
            self.begin()
        except OSError as error:
            self.close()
            raise SnapshotError(
                f"a snapshot directory must be writable, and its parent must exist (got {error.strerror}: "
                f"{error.filename or self.directory}); choose another one for {self.directory}"
            ) from error

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
                raise SnapshotError(self._write_failure(error)) from error
            logger.warning("%s was replaced while this server ran; it is locked anew", self.directory)
        return super().save(state)

    def path_of(self, generation: int) -> Path:
        """Its file."""
        return self.directory / _name("generation", generation)

    # ---- the directory ---------------------------------------------------------------------------------------------

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


def _name(kind: str, generation: int) -> str:
    return f"{kind}-{generation:012d}"
