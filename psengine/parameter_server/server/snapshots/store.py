"""Durable generations of a server process's state: all its shards in one, so that they agree with each other.

<directory>/lock                         flock of the live server; its process id
<directory>/generation-000000000012/     complete, or it would not have this name; see ``snapshot_files``
<directory>/unfinished-000000000013/     being written and fsynced; a rename makes it generation 13: the commit point
<directory>/discarded-000000000010/      being removed
"""

from __future__ import annotations

import copy
import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from psengine.errors import SnapshotError
from psengine.parameter_server.server.snapshots.files import (
    ChunkState,
    DamagedFileError,
    JobState,
    check_states,
    flush_directory,
    read_generation,
    write_generation,
)
from psengine.protocol.layout import balance

__all__ = ["ChunkState", "JobState", "Loaded", "SnapshotStore", "distribute"]

logger = logging.getLogger(__name__)

_GENERATION = re.compile(r"generation-(\d{12})")
_LEFTOVER = re.compile(r"(?:unfinished|discarded)-(\d{12})")


@dataclass(frozen=True)
class Loaded:
    """A generation that was read.

    Attributes:
        generation: its number.
        written_at: UTC wall-clock time in ISO 8601, for humans.
        shards: the jobs of each shard, as they were saved; the tensors own their memory.
        notes: newer generations that were skipped, each naming a file and what is wrong with it.
    """

    generation: int
    written_at: str
    shards: list[list[JobState]]
    notes: list[str] = field(default_factory=list)


class SnapshotStore:
    """The generations in one directory; for one server process, and one thread at a time.

    Args:
        directory: created if it is absent; its parent must exist.
        keep: generations to keep, at least 1. The disk must hold one more, because a new one is complete before the
            oldest goes. More costs room, fewer leaves less to fall back on when a file turns out damaged.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        assert keep >= 1
        self.directory = Path(directory).absolute()
        self.keep = keep
        self._lock: int | None = None
        self._last_generation = 0
        self._present: set[int] = set()
        # Those of them that could not be read or may be another server's: they are nothing to fall back on.
        self._damaged: set[int] = set()

    def open(self) -> None:
        """Take the directory: lock it, see that it is writable, remove what killed writers left unfinished.

        Raises:
            SnapshotError: another live server has it, it cannot be created, or it cannot be written to.
        """
        assert self._lock is None, "the store is open already"
        try:
            self._create_directory()
            self._lock = self._take_lock()
            self._present, self._damaged = set(self._numbers(_GENERATION)), set()
            self._last_generation = max([0, *self._present, *self._numbers(_LEFTOVER)])
            self._remove_leftovers()
            # A lock file of old can be opened where nothing new can be created.
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
        """Let go of the directory; the lock also ends with the process."""
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
        """Number of the newest generation that is there and not known to be damaged; None without one.

        Raises:
            OSError: it cannot be seen now whether there is one, for want of file descriptors perhaps.
        """
        try:
            if not self._is_ours():
                return None
            there = self._present.intersection(self._numbers(_GENERATION))
        except FileNotFoundError:
            return None
        return max(there - self._damaged, default=None)

    def save(self, shards: Sequence[list[JobState]]) -> int:
        """Write one generation of all shards' jobs and remove those beyond ``keep``; the new one's number.

        Durable when this returns. Tensors are read while this runs: pass copies, or leave them alone.

        Raises:
            SnapshotError: it was not written, and what there is of it was removed; the message says which older
                generation is still there. The next ``save`` starts from scratch. Or the directory was replaced, and
                another server has the new one.
        """
        assert self._lock is not None, "the store is not open"
        check_states(shards)
        # A number is used once, even if its attempt fails: a page that could not be written may look clean afterwards,
        # so nothing of that attempt is touched again (PostgreSQL's "fsyncgate").
        self._last_generation += 1
        try:
            self._retake_if_replaced()
            self._present.intersection_update(self._numbers(_GENERATION))
            self._write(self._last_generation, shards)
        except OSError as error:
            raise SnapshotError(self._write_failure(error, self._last_generation, shards)) from error
        self._present.add(self._last_generation)
        self._prune()
        with suppress(OSError):
            self._remove_leftovers()
        return self._last_generation

    def load(self) -> Loaded | None:
        """Read the newest generation that is intact; None if there is none at all.

        Raises:
            SnapshotError: there are generations, and none is intact.
        """
        assert self._lock is not None, "the store is not open"
        notes: list[str] = []
        for generation in sorted(self._present, reverse=True):
            try:
                written_at, shards = read_generation(self._path("generation", generation), generation)
            except (DamagedFileError, OSError) as error:
                self._damaged.add(generation)
                notes.append(f"generation {generation} is skipped: {error}")
            else:
                return Loaded(generation, written_at, shards, notes)
        if not notes:
            return None
        raise SnapshotError(
            f"no snapshot in {self.directory} can be read:\n"
            + "\n".join(notes)
            + "\nput a copy of a generation back, or choose another directory to start without a snapshot"
        )

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _write(self, generation: int, shards: Sequence[list[JobState]]) -> None:
        kind = "unfinished"
        try:
            write_generation(self._path(kind, generation), generation, shards)
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
        for generation in sorted(self._present, reverse=True):
            if newer_intact >= self.keep:
                self._discard("generation", generation)
                self._present.discard(generation)
            newer_intact += generation not in self._damaged

    def _remove_leftovers(self) -> None:
        for kind in ("unfinished", "discarded"):
            for generation in self._numbers(_LEFTOVER):
                self._discard(kind, generation)

    def _discard(self, kind: str, generation: int) -> None:
        """Remove a directory; as a generation it ends at once, not file by file. What stays is removed later."""
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
        """Whether the lock file in the directory is the one that is held."""
        assert self._lock is not None
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.directory / "lock"))
        except FileNotFoundError:
            return False

    def _retake_if_replaced(self) -> None:
        """Lock the directory anew if its lock file is another by now: the old lock keeps nobody out.

        Somebody deleted it and made it again, or mounted something there. Without the new lock two servers would
        remove each other's generations.
        """
        if self._is_ours():
            return
        assert self._lock is not None
        self._present, self._damaged = set(), set()
        lock = self._take_lock()
        os.close(self._lock)
        self._lock = lock
        logger.warning("%s was replaced while this server ran; it is locked anew", self.directory)
        self._present = set(self._numbers(_GENERATION))
        self._damaged = set(self._present)
        taken = [*self._present, *self._numbers(_LEFTOVER)]
        self._last_generation = max([self._last_generation, *(number + 1 for number in taken)])

    def _path(self, kind: str, generation: int) -> Path:
        return self.directory / f"{kind}-{generation:012d}"

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        matches = (pattern.fullmatch(name) for name in os.listdir(self.directory))
        return [int(match[1]) for match in matches if match]


def distribute(
    shards_loaded: Sequence[list[JobState]],
    shard_count: int,
    merge_meta: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> list[list[JobState]]:
    """Spread what was saved by some number of shards over ``shard_count``; tensors are moved, not copied.

    With as many shards as before everything stays where and as it was. Otherwise each job is at every new shard, its
    meta there the ``merge_meta`` of what the old shards had, in their order, and its chunks balanced by bytes.

    Raises:
        SnapshotError: two shards hold the same chunk.
    """
    assert shard_count >= 1
    parts: dict[str, list[JobState]] = {}
    for jobs in shards_loaded:
        for job in jobs:
            parts.setdefault(job.name, []).append(job)
    for name, job_parts in parts.items():
        keys = [chunk.key for part in job_parts for chunk in part.chunks]
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise SnapshotError(f"a chunk is at one shard only (job {name!r}, got several of keys {twice[:10]})")
    if len(shards_loaded) == shard_count:
        return [list(jobs) for jobs in shards_loaded]

    shards: list[list[JobState]] = [[] for _ in range(shard_count)]
    for name, job_parts in parts.items():
        meta = merge_meta([part.meta for part in job_parts])
        here = [JobState(name, copy.deepcopy(meta), []) for _ in range(shard_count)]
        chunks = sorted((chunk for part in job_parts for chunk in part.chunks), key=lambda chunk: chunk.key)
        # A chunk whose values nobody stored still means traffic: where all are empty, their number is balanced.
        sizes_bytes = [max(chunk.size_bytes, 1) for chunk in chunks]
        for chunk, shard in zip(chunks, balance(sizes_bytes, shard_count), strict=True):
            here[shard].chunks.append(chunk)
        for jobs, job in zip(shards, here, strict=True):
            jobs.append(job)
    return shards
