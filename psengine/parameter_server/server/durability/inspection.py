"""What is in a server's directory, and a copy of it that a server starts from; while its server runs, too.

A copy is whole because of the order: the files of the log are listed, then the newest generation is copied, then what
was listed, and what has come since. Generations never change, and a segment only grows.
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
from psengine.parameter_server.server.log.reading import LogReader, Placed, start_of
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.snapshots.store import SnapshotStore

# How often a copy is begun again because generations went while it was made.
_TRIES = 5


def inspect(directory: Path) -> Iterator[str]:
    """Lines for people: generations, segments, jobs, versions, and what a server would start with. Changes nothing.

    Raises:
        SnapshotError: no server could start from it; the message says why.
    """
    _check_is_servers(directory)
    store, disk = SnapshotStore(directory), DirectoryDisk(directory)
    numbers = store.numbers()
    for number in numbers:
        yield f"generation {number}: {store.path_of(number)}, {_size_of(store.path_of(number)) >> 10} KiB"
    if not numbers:
        yield "no generation"
    for shard, found in segments(disk).items():
        for segment in found:
            yield _describe_segment(disk, shard, segment)
    yield from _describe_recovery(recover(store))


def _describe_segment(disk: DirectoryDisk, shard: int, segment: int) -> str:
    name = segment_name(shard, segment)
    text = f"segment {name}: {disk.size_bytes(name) >> 10} KiB"
    try:
        first = next(iter(LogReader(disk, shard, segment, None)), None)
    except SnapshotError as error:
        return f"{text}, {error}"
    if first is None or first.record.kind is not RecordKind.SEGMENT:
        return f"{text}, nothing whole in it"
    return f"{text}, from record {_first(first)}"


def _first(placed: Placed) -> str:
    content = start_of(placed)
    return f"{content['first']}{', where a server started' if content['begins_life'] else ''}"


def _describe_recovery(recovered: Recovered) -> Iterator[str]:
    generation = "no generation" if recovered.loaded is None else f"generation {recovered.loaded.generation}"
    records = ", ".join(f"{count} of shard {shard}" for shard, count in enumerate(recovered.records) if count)
    yield f"a server would start from {generation} and these records of the log: {records or 'none'}"
    for note in recovered.notes:
        yield f"left out: {note}"
    jobs: dict[str, list[int]] = {}
    shown: dict[str, str] = {}
    for states in recovered.shards:
        for state in states:
            jobs.setdefault(state.name, []).extend(chunk.meta["version"] for chunk in state.chunks)
            members = len(state.meta["members"])
            is_whole = "" if state.meta.get("is_sealed", True) else ", not registered to its end, so left out"
            shown[state.name] = f"{rule_text(state.meta['rule'])}, {members} workers{is_whole}"
    for name, versions in sorted(jobs.items()):
        span = f"{min(versions, default=0)} to {max(versions, default=0)}"
        yield f"job {name!r}: {shown[name]}, {len(versions)} chunks, versions {span}"
    if not jobs:
        yield "no job"


def back_up(directory: Path, target: Path) -> Iterator[str]:
    """Copy what a server needs to start from ``directory`` to ``target``, which is made; then read the copy.

    The copy has every update that was acknowledged before this was called. Yields lines for people.

    Raises:
        SnapshotError: the copy could not be made, or cannot be read.
    """
    _check_is_servers(directory)
    if target.exists():
        raise SnapshotError(f"{target} is there already (expected a path where nothing is: the copy is made new)")
    target.mkdir(mode=0o700, parents=True)
    for attempt in range(_TRIES):
        try:
            _copy(directory, target)
            break
        except FileNotFoundError as error:
            if attempt == _TRIES - 1:
                text = f"{directory} changed {_TRIES} times while it was copied, the last time {error.filename}"
                raise SnapshotError(f"{text}; make snapshots less often (--snapshot-interval-s)") from error
            shutil.rmtree(target)
            target.mkdir(mode=0o700)
    yield f"copied to {target}"
    yield from _describe_recovery(recover(SnapshotStore(target)))


def _copy(directory: Path, target: Path) -> None:
    listed = segments(DirectoryDisk(directory))
    store = SnapshotStore(directory)
    newest = max(store.numbers(), default=None)
    if newest is not None:
        source = store.path_of(newest)
        shutil.copytree(source, target / source.name)
    # The generation may be newer than the list, and go on in a newer segment.
    for shard, numbers in segments(DirectoryDisk(directory)).items():
        listed[shard] = sorted({*listed.get(shard, ()), *numbers})
    needed = store.log_places(newest) if newest is not None else {}
    for shard, numbers in listed.items():
        for number in numbers:
            if number >= needed.get(shard, (1, 0))[0]:
                shutil.copyfile(directory / segment_name(shard, number), target / segment_name(shard, number))


def _check_is_servers(directory: Path) -> None:
    if not directory.is_dir():
        raise SnapshotError(f"{directory} is no directory (expected the --snapshot-dir of a server)")
    if not SnapshotStore(directory).numbers() and not segments(DirectoryDisk(directory)):
        raise SnapshotError(
            f"{directory} has no generation and no log (expected the --snapshot-dir that a server has written to)"
        )


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())
