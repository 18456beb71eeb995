"""Durable generations of a server process's state. A generation has all shards, so that they agree with each other.

<directory>/lock                         flock of the live server; its process id
<directory>/generation-000000000012/     complete, or it would not have this name; see ``files.py``
<directory>/unfinished-000000000013/     being written and fsynced; a rename makes it generation 13: the commit point
<directory>/discarded-000000000010/      being removed
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from psengine.errors import SnapshotError
from psengine.parameter_server.server.snapshots.files import (
    ChunkState,
    DamagedFileError,
    JobState,
    LogPlaces,
    flush_directory,
    read_generation,
    read_log_places,
    write_generation,
)

__all__ = ["ChunkState", "JobState", "Loaded", "LogPlaces", "SnapshotStore"]

logger = logging.getLogger(__name__)

KEPT = 2
_GENERATION = re.compile(r"generation-(\d{12})")
_LEFTOVER = re.compile(r"(?:unfinished|discarded)-(\d{12})")


@dataclass(frozen=True)
class Loaded:
    """A generation that was read.

    Attributes:
        generation: its number.
        shards: the jobs of each shard, as they were saved; the tensors own their memory.
        log: where each shard's log goes on from it.
        notes: newer generations that were skipped, each naming a file and what is wrong with it.
    """

    generation: int
    shards: list[list[JobState]]
    log: LogPlaces
    notes: list[str] = field(default_factory=list)


class SnapshotStore:
    """The generations in one directory; for one server process, and one thread at a time.

    The newest ``KEPT`` intact ones are kept. The disk must hold one more: a new one is complete before the oldest goes.

    Args:
        directory: created if it is absent; its parent must exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()
        self._lock: int | None = None
        self._last_generation = 0
        # Generations that could not be read, or may be another server's: nothing to fall back on.
        self._damaged: set[int] = set()

    def open(self) -> None:
        """Take the directory: lock it, see that it is writable, remove what killed writers left unfinished.

        Raises:
            SnapshotError: another live server has it, or it cannot be created or written to.
        """
        assert self._lock is None, "the store is open already"
        try:
            self._create_directory()
            self._lock = self._take_lock()
            self._damaged = set()
            self._last_generation = max([0, *self._numbers(_GENERATION), *self._numbers(_LEFTOVER)])
            self._remove_leftovers()
            # An old lock file can be opened where nothing new can be created.
            probe = self._path("unfinished", 0)
            probe.mkdir()
            probe.rmdir()
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
    def newest(self) -> int | None:
        """Number of the newest generation that is not known to be damaged; None without one.

        Raises:
            OSError: the directory cannot be read now, perhaps because no file descriptor is free.
        """
        try:
            if not self._is_ours():
                return None
            return max(set(self._numbers(_GENERATION)) - self._damaged, default=None)
        except FileNotFoundError:
            return None

    def save(self, shards: Sequence[list[JobState]], log: LogPlaces | None = None) -> int:
        """Write one generation of all shards' jobs, durable when this returns, and remove the oldest; the new number.

        Args:
            shards: the jobs of each.
            log: where each shard's log goes on from them.

        Raises:
            SnapshotError: it was not written, and no part of it is left; the message says which older generation is
                still there. Or the directory was replaced, and another server has the new one.
        """
        # A failed attempt's number and files are not used again: a page that could not be written may look clean
        # afterwards (PostgreSQL's "fsyncgate").
        self._last_generation += 1
        try:
            self._retake_if_replaced()
            self._write(self._last_generation, shards, log or {})
        except OSError as error:
            raise SnapshotError(self._write_failure(error, self._last_generation, shards)) from error
        with suppress(OSError):
            self._prune()
            self._remove_leftovers()
        return self._last_generation

    def load(self) -> Loaded | None:
        """Read the newest generation that is intact; None if there is none at all.

        Raises:
            SnapshotError: there are generations, and none is intact.
        """
        notes: list[str] = []
        for generation in sorted(self._numbers(_GENERATION), reverse=True):
            try:
                shards = read_generation(self.path_of(generation), generation)
                log = self.log_places(generation)
            except (DamagedFileError, OSError) as error:
                self._damaged.add(generation)
                notes.append(f"generation {generation} is skipped: {error}")
            else:
                return Loaded(generation, shards, log, notes)
        if not notes:
            return None
        raise SnapshotError(
            f"no snapshot in {self.directory} can be read:\n"
            + "\n".join(notes)
            + "\nput a copy of a generation back, or choose another directory to start without a snapshot"
        )

    # ---- writing ---------------------------------------------------------------------------------------------------

    def generations(self) -> list[int]:
        """Numbers of those that are there, ascending; without a look at what is in them."""
        return sorted(self._numbers(_GENERATION))

    def path_of(self, generation: int) -> Path:
        """Its directory."""
        return self._path("generation", generation)

    def log_places(self, generation: int) -> LogPlaces:
        """Where each shard's log goes on from it.

        Raises:
            OSError, DamagedFileError: it cannot be read.
        """
        return read_log_places(self.path_of(generation), generation)

    def needed_segments(self) -> dict[int, int]:
        """By shard, the first segment of the log that some generation which is kept goes on from.

        Raises:
            OSError, DamagedFileError: a generation cannot be read.
        """
        kept = set(self._numbers(_GENERATION)) - self._damaged
        places = [self.log_places(number) for number in kept]
        shards = {shard for one in places for shard in one}
        return {shard: min(one.get(shard, (1, 0))[0] for one in places) for shard in shards}

    def _write(self, generation: int, shards: Sequence[list[JobState]], log: LogPlaces) -> None:
        kind = "unfinished"
        try:
            write_generation(self._path(kind, generation), generation, shards, log)
            os.rename(self._path(kind, generation), self._path("generation", generation))
            kind = "generation"
            flush_directory(self.directory)
        except BaseException:
            self._discard(kind, generation)
            raise

    def _write_failure(self, error: OSError, generation: int, shards: Sequence[list[JobState]]) -> str:
        text = f"snapshot generation {generation} was not written: {error.strerror} ({error.filename or self.directory}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted_bytes = sum(chunk.size_bytes for jobs in shards for job in jobs for chunk in job.chunks)
            with suppress(OSError):
                free_bytes = shutil.disk_usage(self.directory).free
                text += f"; expected room for {wanted_bytes} bytes and a manifest, got {free_bytes} free"
        try:
            older = self.newest
        except OSError:
            durable = "whether an older one is there cannot be seen now"
        else:
            durable = "there is no older one" if older is None else f"generation {older} stays durable"
        return f"{text}); {durable}"

    def _prune(self) -> None:
        newer_intact = 0
        for generation in sorted(self._numbers(_GENERATION), reverse=True):
            if newer_intact >= KEPT:
                self._discard("generation", generation)
            newer_intact += generation not in self._damaged

    def _remove_leftovers(self) -> None:
        for kind in ("unfinished", "discarded"):
            for generation in self._numbers(_LEFTOVER):
                self._discard(kind, generation)

    def _discard(self, kind: str, generation: int) -> None:
        """Remove a directory. A generation is renamed first, so that its name never stands for a part of it."""
        path, discarded = self._path(kind, generation), self._path("discarded", generation)
        if not path.exists():
            return
        try:
            if kind == "generation":
                os.rename(path, discarded)
                path = discarded
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error)

    # ---- the directory ---------------------------------------------------------------------------------------------

    def _create_directory(self) -> None:
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700)
            flush_directory(self.directory.parent)

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

    def _retake_if_replaced(self) -> None:
        """Lock the directory anew if somebody deleted and remade it: the old lock keeps no other server out."""
        if self._is_ours():
            return
        lock = self._take_lock()
        self.close()
        self._lock = lock
        logger.warning("%s was replaced while this server ran; it is locked anew", self.directory)
        self._damaged = set(self._numbers(_GENERATION))
        taken = [*self._damaged, *self._numbers(_LEFTOVER)]
        self._last_generation = max([self._last_generation, *(number + 1 for number in taken)])

    def _path(self, kind: str, generation: int) -> Path:
        return self.directory / f"{kind}-{generation:012d}"

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        matches = (pattern.fullmatch(name) for name in os.listdir(self.directory))
        return [int(match[1]) for match in matches if match]
