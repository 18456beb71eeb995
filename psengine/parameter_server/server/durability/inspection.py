"""What is in a server's directory, and a copy of it that a server starts from; while its server runs, too.

A copy is whole because the log from a generation on began before the generation was kept. Generations never change, and
a segment only grows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability.restoring import Recovered, recover
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import segment_name, segments
from psengine.parameter_server.server.snapshots.files import generation_name, read_needed_rows, read_places, rows_name
from psengine.parameter_server.server.snapshots.generations import Generations


def inspect(directory: Path) -> Iterator[str]:
    """Lines for people: the files, and what a server would start with. Changes nothing.

    Raises:
        SnapshotError: no server could start from it; the message says why.
    """
    store = _open(directory)
    for name in sorted(store.disk.list()):
        yield f"{name}: {store.disk.size_bytes(name) >> 10} KiB"
    yield from _describe(recover(store))


def back_up(directory: Path, target: Path) -> Iterator[str]:
    """Copy what a server needs to start from ``directory`` to ``target``, which is made; then read the copy.

    The copy has every update that was acknowledged before this was called. Yields lines for people.

    Raises:
        SnapshotError: the copy could not be made, or cannot be read.
    """
    store = _open(directory)
    if target.exists():
        raise SnapshotError(f"{target} is there already (expected a path where nothing is: the copy is made new)")
    target.mkdir(mode=0o700, parents=True)
    newest = max(store.numbers(), default=None)
    places = None if newest is None else read_places(store.disk, newest)
    with ExitStack() as stack:
        # What is open can be read to its end, whatever the server deletes meanwhile.
        rows = [] if newest is None else sorted(read_needed_rows(store.disk, newest))
        names = [] if newest is None else [generation_name(newest), *map(rows_name, rows)]
        files = [stack.enter_context(open(directory / name, "rb")) for name in names]
        for shard, numbers in segments(store.disk).items():
            for number in numbers:
                if places is None or (shard in places and number >= places[shard].segment):
                    files.append(stack.enter_context(open(directory / segment_name(shard, number), "rb")))
        for file in files:
            with open(target / Path(file.name).name, "xb") as copy:
                shutil.copyfileobj(file, copy)
    yield f"copied to {target}"
    yield from _describe(recover(Generations(DirectoryDisk(target))))


def _describe(recovered: Recovered) -> Iterator[str]:
    yield f"a server would start from {recovered.describe()}"
    for note in recovered.notes:
        yield f"left out: {note}"


def _open(directory: Path) -> Generations:
    store = Generations(DirectoryDisk(directory))
    if not directory.is_dir() or not (store.numbers() or segments(store.disk)):
        raise SnapshotError(
            f"{directory} has no generation and no log (expected the --snapshot-dir that a server has written to)"
        )
    return store
