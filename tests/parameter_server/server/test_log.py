"""The write-ahead log of a shard, without threads: what was durable comes back, or an error names the place."""

from __future__ import annotations

import errno
import os

import pytest
from support.memory_disk import MemoryDisk

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import BEGINNING, Place, ShardLog, segment_name, segments
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import Record, RecordKind

EPOCH = 7


def record(number, size_bytes=5):
    frames = [f"update {number}".encode(), bytes(size_bytes)]
    return Record(RecordKind.MESSAGE, job=number + 1, frames=frames)


class Written:
    """A log on a disk. Each segment's first record describes it, so the first update of all has the number 1."""

    def __init__(self, disk=None, epoch=EPOCH, last=BEGINNING):
        self.disk = disk or MemoryDisk()
        self.log = ShardLog(self.disk, 0, epoch, last)

    def append(self, count, **options):
        for _ in range(count):
            self.log.append(record(self.log.end, **options))
        return self

    def write(self):
        while self.log.has_unwritten:
            self.log.write()
            self.log.sync()
        return self

    def group(self, count, **options):
        """Records that become durable together."""
        return self.append(count, **options).write()


def read(disk, start=None):
    """The numbers of the updates that are read, which must be those that were appended; the end, and notes."""
    numbers, notes = [], []
    reader = LogReader(disk, 0, start, notes)
    for one in reader:
        frames = [bytes(frame) for frame in one.frames]
        assert one._replace(frames=frames, number=0, durable=0) == record(one.number, len(frames[-1]))
        numbers.append(one.number)
    return numbers, reader.end, notes


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_records_come_back_over_segments_and_lives(tmp_path, kind):
    disk = MemoryDisk() if kind == "memory" else DirectoryDisk(tmp_path)
    log = Written(disk).group(3).group(1)
    second = log.log.cut()
    assert second == log.log.cut() == Place(2, 5, EPOCH)
    log.group(4, size_bytes=300_000)
    numbers, end, notes = read(disk)
    assert (numbers, end, notes) == ([1, 2, 3, 4, 6, 7, 8, 9], Place(2, 10, EPOCH), [])
    assert read(disk, second)[0] == [6, 7, 8, 9]
    Written(disk, EPOCH + 1, last=end).group(2)
    assert read(disk)[0] == [*numbers, 11, 12]
    assert segments(disk) == {0: [1, 2, 3]}
    disk.delete(segment_name(0, 1))
    assert read(disk, second)[0] == [6, 7, 8, 9, 11, 12]


def test_a_segment_is_synced_before_the_next_exists():
    log = Written().append(2)
    log.log.cut()
    log.append(1)
    assert log.log.begun == 0
    log.log.write()
    assert (log.log.begun, log.log.written, log.log.durable) == (1, 3, 0)
    assert segments(log.disk) == {0: [1]}
    log.log.write()
    assert (log.log.begun, log.log.written, log.log.durable) == (2, 5, 3)
    assert read(log.disk.after_power_loss(), Place(2, 3, EPOCH))[0] == [4]


def test_a_tail_torn_at_any_byte_is_cut_off():
    """Two groups are durable; the third was being written: each of its records is there as a whole, or not at all."""
    log = Written().group(2).group(1)
    durable_bytes = len(log.disk.files[segment_name(0, 1)])
    log.append(3, size_bytes=20)
    log.log.write()
    whole = log.disk.files[segment_name(0, 1)]
    size_bytes = record(4, 20).size_bytes
    for length in range(durable_bytes, len(whole) + 1):
        numbers, _, notes = read(MemoryDisk({segment_name(0, 1): whole[:length]}))
        left, rest = divmod(length - durable_bytes, size_bytes)
        assert numbers == list(range(1, 4 + left))
        assert bool(notes) == bool(rest)


def test_a_flipped_bit_anywhere_is_refused_with_file_and_place():
    """Only the last group cannot be told from one that was being written."""
    log = Written().group(1).group(2).group(1)
    whole = bytes(log.disk.files[segment_name(0, 1)])
    end = len(whole) - record(4).size_bytes
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        disk = MemoryDisk({segment_name(0, 1): damaged})
        if place < end:
            with pytest.raises(SnapshotError, match=rf"{segment_name(0, 1)} is damaged at byte \d+"):
                read(disk)
        else:
            assert read(disk)[0] == [1, 2, 3]


def three_segments(epoch=EPOCH):
    log = Written(epoch=epoch).group(1)
    for _ in range(2):
        log.log.cut()
        log.group(1)
    return {name: bytes(content) for name, content in log.disk.files.items()}


def test_a_missing_or_foreign_segment_is_refused():
    files, others = three_segments(), three_segments(EPOCH + 1)
    first, second, third = sorted(files)
    with pytest.raises(SnapshotError, match=f"{second} .*missing"):
        read(MemoryDisk({first: files[first], third: files[third]}))
    with pytest.raises(SnapshotError, match="another segment's"):
        read(MemoryDisk({first: files[first], second: files[third]}))
    with pytest.raises(SnapshotError, match="does not begin"):
        read(MemoryDisk({first: files[first], second: b"", third: files[third]}))
    # Cut off at the end of a record, so that only the next segment tells.
    with pytest.raises(SnapshotError, match="records are missing"):
        read(MemoryDisk(files | {second: files[second][: -record(3).size_bytes]}))
    # Of another directory, in the middle and at the end.
    for name in (second, third):
        with pytest.raises(SnapshotError, match=f"{name} .*another segment's .*'before': {EPOCH}"):
            read(MemoryDisk(files | {name: others[name]}))


def test_the_segment_that_a_generation_goes_on_in_is_there_or_refused():
    """A generation is not kept before, so that no death of a server leaves it without."""
    files, others = three_segments(), three_segments(EPOCH + 1)
    third, place = segment_name(0, 3), Place(3, 4, EPOCH)
    assert read(MemoryDisk(files), place)[0] == [5]
    without = {name: content for name, content in files.items() if name != third}
    for damaged, words in (
        (without, "the file is missing"),
        (files | {third: b""}, "does not begin"),
        (files | {third: files[third][:30]}, "does not begin"),
        (files | {third: others[third]}, f"another segment's .*'epoch': {EPOCH}"),
        ({}, "the file is missing"),
    ):
        with pytest.raises(SnapshotError, match=f"{third} .*{words}"):
            read(MemoryDisk(damaged), place)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["fsync", "fdatasync"])
def test_what_was_not_synced_is_no_full_disk(tmp_path, monkeypatch, number, what):
    """The records are in the file: another try would write them twice. And nobody finds a part of a file."""

    def fail(descriptor):
        raise OSError(number, "failed")

    monkeypatch.setattr(os, what, fail)
    log = ShardLog(DirectoryDisk(tmp_path), 0, EPOCH)
    with pytest.raises(OSError, match="it could not be made durable: failed") as failure:
        log.write()
    assert (failure.value.errno, log.begun) == (errno.EIO, 0)
    log.close()
    assert os.listdir(tmp_path) == []


def test_a_directory_writes_many_pieces_and_names_the_file_in_errors(tmp_path):
    disk = DirectoryDisk(tmp_path)
    file = disk.create("a")
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    file.append(pieces)
    file.append([b"end"])
    assert os.listdir(tmp_path) == ["unfinished-a"]
    file.commit()
    assert disk.read("a", 0, 1 << 20) == b"".join(pieces) + b"end"
    assert disk.size_bytes("a") == sum(map(len, pieces)) + 3
    assert disk.free_bytes() > 0
    (tmp_path / "a").rename(tmp_path / "b")
    for text in ("No such file", "was replaced"):
        with pytest.raises(OSError, match=text) as error:
            file.sync()
        assert error.value.filename == str(tmp_path / "a")
        (tmp_path / "a").touch()
    file.close()
    with pytest.raises(OSError, match="Bad file") as error:
        file.append([b"x"])
    assert error.value.filename == str(tmp_path / "a")
    disk.delete("a")
    disk.delete("a")
    assert os.listdir(tmp_path) == ["b"]
