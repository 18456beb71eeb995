"""Durable generations of a server process's state. A generation has all shards, so that they agree with each other.

generation-000000000012     see ``files.py``
rows-000000000009           rows of tables, written before the generation; kept as long as one that is kept needs them
log-000-000000000003        see ``log/``; kept as long as a generation that is kept goes on in it, or before it
life-1786705423741944077    empty; the epoch of the newest life, which the next one's exceeds
unfinished-...              either of them, being written and fsynced; the rename is the commit point
lock                        of a directory: flock of the live server; its process id
"""

from __future__ import annotations

import logging
import re
from contextlib import closing, suppress

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import FULL_ERRORS, UNFINISHED, Disk
from psengine.parameter_server.server.log.log import Place, later_epoch, segment_name, segments
from psengine.parameter_server.server.snapshots.files import (
    ServerState,
    generation_name,
    read_generation,
    read_needed_rows,
    read_places,
    rows_name,
    write_generation,
)

logger = logging.getLogger(__name__)

KEPT = 2
# With less room than this, only the newest is kept of generations from which a log goes on: the log is what needs room.
LOW_BYTES = 1 << 30
# Of a generation, beside its tensors' elements: what describes them.
_TENSOR_BYTES = 4096
_NAME = re.compile(r"generation-(\d{12})")
_ROWS_NAME = re.compile(r"rows-(\d{12})")
_LIFE_NAME = re.compile(r"life-(\d+)")


class Generations:
    """Those on one disk; written by one server process, and used by one thread at a time.

    The newest ``KEPT`` intact ones are kept. The disk must hold one more: a new one is complete before the oldest goes.
    Where it does not, one goes before.

    Args:
        keeps_history: nothing of the log goes, nor the generation that it began with.

    Attributes:
        disk: the directory that they are in.
        last: the highest number that was used, here or before.
        needed_bytes: room that the next one needs, as far as the last one tells.
    """

    def __init__(self, disk: Disk, *, keeps_history: bool = False) -> None:
        self.disk, self.keeps_history = disk, keeps_history
        self.last = 0
        self.needed_bytes = 0
        self._first = 0  # no log leads here from older ones
        self._damaged: set[int] = set()  # generations that could not be read: nothing to fall back on
        self._written: set[int] = set()  # of this life

    def begin(self) -> None:
        """Take the disk, go on with its numbers, remove what killed writers left.

        Raises:
            OSError: the directory cannot be locked or read.
            SnapshotError: another live server has it.
        """
        self.disk.lock()
        self.last = max([self.last, *self.numbers(), *self._numbers(_ROWS_NAME)])
        for name in self.disk.list():
            if name.startswith(UNFINISHED):
                self.disk.delete(name)

    def begin_life(self, drawn: int, *known: int) -> int:
        """Choose the epoch of a life that begins here, write it down, and return it.

        It is above ``known`` and those of all former lives in this directory, whatever the clock shows.

        Args:
            drawn: an epoch by the clock.
            known: epochs of former lives from elsewhere, such as the log.

        Raises:
            OSError: it could not be written.
        """
        former = self._numbers(_LIFE_NAME)
        epoch = later_epoch(drawn, *former, *known)
        self.mark(f"life-{epoch}")
        for number in former:
            self.disk.delete(f"life-{number}")
        return epoch

    def mark(self, name: str) -> None:
        """Make an empty file, durable when this returns."""
        with closing(self.disk.create(name)) as file:
            file.commit()

    # ---- what is there ---------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Numbers of those that are there, ascending; without a look at what is in them."""
        return self._numbers(_NAME)

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        return sorted(int(match[1]) for match in map(name.fullmatch, self.disk.list()) if match)

    def begin_anew(self) -> None:
        """No log leads from those that are there to the next one: they go once it is written."""
        self._first = self.last + 1

    def _intact(self) -> list[int]:
        return [number for number in self.numbers() if number >= self._first and number not in self._damaged]

    def first_logged(self) -> int | None:
        """Number of the oldest intact one from which a log goes on."""
        return next((number for number in self._intact() if read_places(self.disk, number)), None)

    def kept_rows(self) -> set[int]:
        """Generations of this life whose rows are there, so that the next one can go on from them."""
        with suppress(OSError):
            return self._written.intersection(self._numbers(_ROWS_NAME))
        return set()

    @property
    def newest(self) -> int | None:
        """Number of the newest that is not known to be damaged; None where there is none, or none can be seen."""
        with suppress(OSError):
            return max(set(self.numbers()) - self._damaged, default=None)
        return None

    def load(self) -> tuple[int | None, ServerState, list[str]]:
        """Read the newest generation that is intact: its number, what it has, and what is wrong with newer ones.

        Raises:
            SnapshotError: there are generations, and none is intact.
        """
        notes: list[str] = []
        for generation in reversed(self.numbers()):
            try:
                return generation, read_generation(self.disk, generation), notes
            except (SnapshotError, OSError) as error:
                self._damaged.add(generation)
                notes.append(f"generation {generation} is skipped: {error}")
        if not notes:
            return None, ServerState([]), notes
        fix = "put a copy of a generation back, or choose another directory to start without a snapshot"
        raise SnapshotError("\n".join([f"no snapshot in {self.disk} can be read:", *notes, fix]))

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
        self.needed_bytes = sum(tensor.nbytes + _TENSOR_BYTES for tensor in state.tensors()) + _TENSOR_BYTES
        rows = state.take_rows()
        try:
            if lost := state.earlier().difference(self._numbers(_ROWS_NAME)):
                raise SnapshotError(f"rows of generations {sorted(lost)} are gone; the next snapshot has all rows")
            self._prune(state.places, self.needed_bytes)
            if state.has_rows:
                self._write(rows_name(self.last), rows)
            self._write(generation_name(self.last), state)
        except OSError as error:
            raise SnapshotError(self._write_failure(error)) from error
        self._written.add(self.last)
        self._prune(state.places, LOW_BYTES if state.places else 0)
        return self.last

    def _write(self, name: str, state: ServerState) -> None:
        with closing(self.disk.create(name)) as file:
            write_generation(file, self.last, state)
            file.commit()

    def _write_failure(self, error: OSError) -> str:
        text = f"snapshot generation {self.last} was not written: {error.strerror} ({error.filename or self.disk}"
        if error.errno in FULL_ERRORS:
            with suppress(OSError):
                text += f"; expected room for {self.needed_bytes} bytes, got {self.disk.free_bytes()} free"
        older = self.newest
        return f"{text}); " + ("there is no older one" if older is None else f"generation {older} stays durable")

    def _prune(self, places: dict[int, Place], room_bytes: int) -> None:
        """Delete all but the newest intact generations, rows and segments that neither they nor ``places`` need.

        One generation is kept where there is less room than ``room_bytes``.
        """
        try:
            kept = 1 if self.disk.free_bytes() < room_bytes else KEPT
            intact = self._intact()[-kept:]
            if not intact:
                return
            older = [number for number in self.numbers() if number < intact[0]]
            if self.keeps_history and (first := self.first_logged()) in older:
                older.remove(first)
                intact.append(first)
            unneeded = [generation_name(number) for number in older]
            needed = [places, *(read_places(self.disk, number) for number in intact)]
            for shard, numbers in segments(self.disk).items():
                first = min((one[shard].segment for one in needed if shard in one), default=numbers[-1] + 1)
                unneeded += [segment_name(shard, number) for number in numbers if number < first]
            if there := self._numbers(_ROWS_NAME):
                rows = set[int]().union(*(read_needed_rows(self.disk, number) for number in intact))
                unneeded += [rows_name(number) for number in there if number not in rows]
            for name in unneeded:
                self.disk.delete(name)
        except (OSError, SnapshotError) as error:
            logger.warning("old generations, or segments of the log, in %s cannot be deleted: %s", self.disk, error)
