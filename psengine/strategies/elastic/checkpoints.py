"""A job's checkpoints: files of the state of all workers, which is one state.

checkpoint-000000000100.safetensors     after 100 steps; see ``tensors/documents.py``
unfinished-...                          being written and fsynced; the rename is the commit point

Nothing in a file depends on how many workers there are, or on which of them wrote it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from psengine.errors import ConfigurationError
from psengine.strategies.elastic.state import Snapshot
from psengine.tensors.documents import Parts, from_file, take_apart, to_file

logger = logging.getLogger(__name__)

KEPT = 2
# At the end of the process, a checkpoint that is being written may take so long.
CLOSE_S = 60.0
_PREFIX = "checkpoint-"
_NAME = re.compile(_PREFIX + r"(\d{12})\.safetensors")


class Checkpoints:
    """Those in one directory, of which this worker may write some.

    A thread writes, so training waits for a copy of the state in memory, and not for the disk.

    Args:
        steps: one is due after each multiple of so many.
        directory: made if it is absent.

    Attributes:
        facts: of this job; written into each, and compared when one is loaded.

    Raises:
        ConfigurationError: ``steps`` is no number of steps.
        OSError: the directory cannot be made.
    """

    def __init__(self, steps: int, directory: str | os.PathLike[str]) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigurationError(
                f"a checkpoint is due after a number of steps (expected at least 1, got {steps!r})"
            )
        self._steps = steps
        from psengine.parameter_server.server.log.disk import DirectoryDisk  # not on Windows, where no server runs

        Path(directory).mkdir(parents=True, exist_ok=True)
        self._disk = DirectoryDisk(Path(directory))
        self.facts: Mapping[str, str] = {}
        self._damaged: set[int] = set()
        self._writer = threading.Thread()

    def newest(self) -> tuple[int, Mapping[str, str]]:
        """The step of the newest that is whole, and the facts of its job; 0 and none without one.

        The log names those that are not whole.
        """
        for step in reversed(self._found()):
            try:
                return step, self._read(step)[1]
            except (OSError, ValueError) as error:
                self._damaged.add(step)
                logger.warning("checkpoint %s is skipped: %s", self.path(step), error)
        return 0, {}

    def load(self, step: int) -> Snapshot:
        """Read the checkpoint of ``step``, which ``newest`` has named.

        Raises:
            OSError, ValueError: it cannot be read any more.
        """
        snapshot, facts = self._read(step)
        for name in sorted(facts.keys() | self.facts.keys()):
            if facts.get(name) != self.facts.get(name):
                logger.warning(
                    "%s is of a job with another %s, so this job's next steps differ (expected %s, got %s)",
                    *(self.path(step), name, facts.get(name), self.facts.get(name)),
                )
        return snapshot

    def is_due(self, completed: int) -> bool:
        """Whether to ``write`` after so many steps."""
        return completed > 0 and completed % self._steps == 0

    def write(self, snapshot: Snapshot) -> None:
        """Copy ``snapshot``, and begin to write it; left out, with a warning, while another is being written."""
        if self._writer.is_alive():
            logger.warning(
                "the checkpoint of step %d is left out: an earlier one is being written to %s. Fix: write less often",
                *(snapshot.completed, self._disk),
            )
            return
        parts = take_apart(vars(snapshot) | {"facts": dict(self.facts)}).copied()
        arguments = snapshot.completed, parts
        self._writer = threading.Thread(target=self._write, args=arguments, name="psengine-checkpoint", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Wait for what is being written, at most ``CLOSE_S``."""
        if self._writer.is_alive():
            self._writer.join(CLOSE_S)
        if self._writer.is_alive():
            logger.warning("a checkpoint in %s is given up: not written after %g s", self._disk, CLOSE_S)

    def path(self, step: int) -> Path:
        """Where a checkpoint lies."""
        return self._disk.directory / f"{_PREFIX}{step:012d}.safetensors"

    def _found(self) -> list[int]:
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, self._disk.list()) if match)

    def _read(self, step: int) -> tuple[Snapshot, dict[str, str]]:
        try:
            name = self.path(step).name
            value = from_file(self._disk.read(name, 0, self._disk.size_bytes(name)))
            facts = value.pop("facts")
            snapshot = Snapshot(**value)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"no checkpoint of this version: {error}") from error
        if snapshot.completed != step:
            raise ValueError(f"it has another step than its name (expected {step}, got {snapshot.completed})")
        return snapshot, facts

    def _write(self, step: int, parts: Parts) -> None:
        from psengine.parameter_server.server.log.disk import UNFINISHED

        try:
            for name in self._disk.list():
                if name.startswith(UNFINISHED + _PREFIX):  # of a killed writer
                    self._disk.delete(name)
            with closing(self._disk.create(self.path(step).name)) as file:
                file.append([to_file(parts)])
                file.commit()
            self._damaged.discard(step)
            for old in [found for found in self._found() if found not in self._damaged][:-KEPT]:
                self._disk.delete(self.path(old).name)
        except OSError as error:
            logger.warning("the checkpoint of step %d was not written to %s: %s", step, self._disk, error)
