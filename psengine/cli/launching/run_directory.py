"""A run's temporary directory; what launchers that were killed left of theirs is removed at the next start.

A launcher holds a lock on a file in its directory for as long as it lives, whatever ends it: a lock that can be taken
has no owner any more, in this container or another one that shares the folder. (A process id would not tell.) Its
servers may outlive it, for as long as workers do, and hold locks on their snapshots.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "psengine-run-"
LOCK = "launcher.lock"
# A launcher has made its file, and is about to lock it; killed one's servers may be writing their last snapshot.
YOUNG_S = 60.0


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory for one run, gone after it; deserted ones of this user go first."""
    with suppress(OSError):
        remove_deserted(Path(tempfile.gettempdir()))
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name,
        open(Path(name) / LOCK, "wb") as file,
    ):
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name)


def remove_deserted(folder: Path, *, young_s: float = YOUNG_S) -> list[Path]:
    """Remove this user's directories of runs in ``folder`` whose launcher is gone; which those were.

    One whose lock is younger than ``young_s`` stays, and one without: it is another version's, or just being made.
    """
    removed = []
    for directory in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            file = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                found = os.fstat(file)
                if found.st_uid != os.getuid() or directory.is_symlink() or time.time() - found.st_mtime < young_s:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for lock in directory.glob("snapshots/**/lock"):
                    with open(lock, "rb") as held:
                        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
            finally:
                os.close(file)
    return removed
