"""What is in a server's directory, and a copy of it that a server starts from; while its server runs, too.

A copy is whole because of the order: the newest generation is copied, then the log from there on, which began before
the generation was kept. Generations never change, and a segment only grows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from psengine.errors import SnapshotError
from psengine.parameter_server.overview import rule_text
from psengine.parameter_server.server.durability.restoring import Recovered, recover
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import segment_name, segments
from psengine.parameter_server.server.log.reading import describe
from psengine.parameter_server.server.snapshots.generations import Generations, generation_name
from psengine.protocol.views import View

# How often a copy is begun again because generations went while it was made.
_TRIES = 5
_MEMBERS = View.__struct_fields__.index("members")


def inspect(directory: Path) -> Iterator[str]:
    """Lines for people: generations, segments, jobs, versions, and what a server would start with. Changes nothing.

    Raises:
        SnapshotError: no server could start from it; the message says why.
    """
    store = _open(directory)
    for number in store.numbers():
        name = generation_name(number)
        yield f"generation {number}: {directory / name}, {store.disk.size_bytes(name) >> 10} KiB"
    if not store.numbers():
        yield "no generation"
    for shard, found in segments(store.disk).items():
        for segment in found:
            name = segment_name(shard, segment)
            yield f"segment {name}: {store.disk.size_bytes(name) >> 10} KiB, {describe(store.disk, name)}"
    yield from _describe_recovery(recover(store))


def _describe_recovery(recovered: Recovered) -> Iterator[str]:
    generation = "no generation" if recovered.generation is None else f"generation {recovered.generation}"
    records = ", ".join(f"{count} of shard {shard}" for shard, count in recovered.records.items())
    yield f"a server would start from {generation} and these records of the log: {records or 'none'}"
    for note in recovered.notes:
        yield f"left out: {note}"
    states = {state.name: state for states in recovered.shards for state in states}
    for name, versions in sorted(recovered.versions().items()):
        meta, span = states[name].meta, f"{min(versions, default=0)} to {max(versions, default=0)}"
        workers = "not registered to its end" if meta["view"] is None else f"{len(meta['view'][_MEMBERS])} workers"
        yield f"job {name!r}: {rule_text(meta['rule'])}, {workers}, {len(versions)} chunks, versions {span}"
    if not states:
        yield "no job"


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
    for attempt in range(_TRIES):
        try:
            _copy(store, directory, target)
            break
        except FileNotFoundError as error:
            if attempt == _TRIES - 1:
                text = f"{directory} changed {_TRIES} times while it was copied, the last time {error.filename}"
                raise SnapshotError(f"{text}; make snapshots less often (--snapshot-interval-s)") from error
            shutil.rmtree(target)
            target.mkdir(mode=0o700)
    yield f"copied to {target}"
    yield from _describe_recovery(recover(Generations(DirectoryDisk(target))))


def _copy(store: Generations, directory: Path, target: Path) -> None:
    newest, places = max(store.numbers(), default=None), None
    if newest is not None:
        places = store.places(newest)
        shutil.copyfile(directory / generation_name(newest), target / generation_name(newest))
    for shard, numbers in segments(store.disk).items():
        for number in numbers:
            if places is None or (shard in places and number >= places[shard].segment):
                shutil.copyfile(directory / segment_name(shard, number), target / segment_name(shard, number))


def _open(directory: Path) -> Generations:
    if not directory.is_dir():
        raise SnapshotError(f"{directory} is no directory (expected the --snapshot-dir of a server)")
    store = Generations(DirectoryDisk(directory))
    if not store.numbers() and not segments(store.disk):
        raise SnapshotError(
            f"{directory} has no generation and no log (expected the --snapshot-dir that a server has written to)"
        )
    return store
