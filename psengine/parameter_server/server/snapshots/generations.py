"""Durable generations of a server process's state. A generation has all shards, so that they agree with each other.

generation-000000000012/     complete, or it would not have this name; see ``files.py``
unfinished-000000000013/     being written and fsynced; a rename makes it generation 13: the commit point
discarded-000000000010/      being removed
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import Disk
from psengine.parameter_server.server.snapshots.files import (
    DamagedFileError,
    JobState,
    LogPlaces,
    read_generation,
    read_log_places,
    write_generation,
)

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


class Generations:
    """Those on one disk; written by one server process, and used by one thread at a time.

    The newest ``KEPT`` intact ones are kept. The disk must hold one more: a new one is complete before the oldest goes.

    Attributes:
        disk: the directory that they are in.
        last: the highest number that was used, here or before.
    """

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.last = 0
        # Generations that could not be read, or may be another server's: nothing to fall back on.
        self._damaged: set[int] = set()

    def begin(self) -> None:
        """Before the first ``save``: go on with the numbers, remove what killed writers left, see that it is writable.

        Raises:
            OSError: nothing can be written.
        """
        self._damaged = set()
        self.last = max([0, *self.numbers(), *self._leftovers()])
        self._remove_leftovers()
        # An old file can be opened where nothing new can be created.
        self.disk.make_directory(_name("unfinished", 0))
        self.disk.delete(_name("unfinished", 0))

    def distrust(self) -> None:
        """Those that are there may be another server's: go on with numbers above theirs, fall back on none of them."""
        self._damaged = set(self.numbers())
        self.last = max([self.last, *(number + 1 for number in (*self._damaged, *self._leftovers()))])

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
                shards = read_generation(self._directory_of(generation), generation)
                log = self.log_places(generation)
            except (DamagedFileError, OSError) as error:
                self._damaged.add(generation)
                notes.append(f"generation {generation} is skipped: {error}")
            else:
                return Loaded(generation, shards, log, notes)
        if not notes:
            return None
        raise SnapshotError(
            f"no snapshot in {self.disk} can be read:\n"
            + "\n".join(notes)
            + "\nput a copy of a generation back, or choose another directory to start without a snapshot"
        )

    def log_places(self, generation: int) -> LogPlaces:
        """Where each shard's log goes on from it.

        Raises:
            OSError, DamagedFileError: it cannot be read.
        """
        return read_log_places(self._directory_of(generation), generation)

    def needed_segments(self) -> dict[int, int]:
        """By shard, the first segment of the log that some generation which is kept goes on from.

        Raises:
            OSError, DamagedFileError: a generation cannot be read.
        """
        places = [self.log_places(number) for number in self.numbers() if number not in self._damaged]
        shards = {shard for one in places for shard in one}
        return {shard: min(one.get(shard, (1, 0))[0] for one in places) for shard in shards}

    # ---- writing ---------------------------------------------------------------------------------------------------

    def save(self, shards: Sequence[list[JobState]], log: LogPlaces | None = None) -> int:
        """Write one generation of all shards' jobs, durable when this returns, and remove the oldest; the new number.

        Args:
            shards: the jobs of each.
            log: where each shard's log goes on from them.

        Raises:
            SnapshotError: it was not written, and no part of it is left; the message says which older generation is
                still there.
        """
        # A failed attempt's number and files are not used again: a page that could not be written may look clean
        # afterwards (PostgreSQL's "fsyncgate").
        self.last += 1
        try:
            self._write(self.last, shards, log or {})
        except OSError as error:
            raise SnapshotError(self._write_failure(error, self.last, shards)) from error
        with suppress(OSError):
            self._prune()
            self._remove_leftovers()
        return self.last

    def _write(self, generation: int, shards: Sequence[list[JobState]], log: LogPlaces) -> None:
        disk, unfinished, complete = self.disk, _name("unfinished", generation), _name("generation", generation)
        kind = "unfinished"
        try:
            write_generation(disk.make_directory(unfinished), generation, shards, log)
            disk.rename(unfinished, complete)
            kind = "generation"
            disk.sync_names()
        except BaseException:
            self._discard(kind, generation)
            raise

    def _write_failure(self, error: OSError, generation: int, shards: Sequence[list[JobState]]) -> str:
        text = f"snapshot generation {generation} was not written: {error.strerror} ({error.filename or self.disk}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            wanted_bytes = sum(chunk.size_bytes for jobs in shards for job in jobs for chunk in job.chunks)
            with suppress(OSError):
                free_bytes = self.disk.free_bytes()
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
        for generation in reversed(self.numbers()):
            if newer_intact >= KEPT:
                self._discard("generation", generation)
            newer_intact += generation not in self._damaged

    def _remove_leftovers(self) -> None:
        for generation in self._leftovers():
            for kind in ("unfinished", "discarded"):
                self._discard(kind, generation)

    def _discard(self, kind: str, generation: int) -> None:
        """Remove a directory. A generation is renamed first, so that its name never stands for a part of it."""
        name, discarded = _name(kind, generation), _name("discarded", generation)
        try:
            if name not in self.disk.list():
                return
            if kind == "generation":
                self.disk.rename(name, discarded)
                name = discarded
            self.disk.delete(name)
        except OSError as error:
            logger.warning("%s/%s could not be removed: %s", self.disk, name, error)

    # ---- names -----------------------------------------------------------------------------------------------------

    def _directory_of(self, generation: int) -> Disk:
        return self.disk.subdirectory(_name("generation", generation))

    def _leftovers(self) -> list[int]:
        return self._numbers(_LEFTOVER)

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        matches = (pattern.fullmatch(name) for name in self.disk.list())
        return [int(match[1]) for match in matches if match]


def _name(kind: str, generation: int) -> str:
    return f"{kind}-{generation:012d}"
