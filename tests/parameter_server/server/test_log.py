"""The write-ahead log of a shard, without threads: what was durable comes back, or an error names the place."""

from __future__ import annotations

import errno
import os

import pytest
from support.memory_disk import MemoryDisk

from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import (
    LogStart,
    Place,
    SegmentWriter,
    ShardLog,
    segment_name,
    segments,
)
from psengine.parameter_server.server.log.reading import DamagedLogError, LogReader
from psengine.parameter_server.server.log.records import HEADER_BYTES, Record, RecordKind

EPOCH = 7


def record(number, size_bytes=5):
    frames = [f"update {number}".encode(), bytes(size_bytes)]
    return Record(RecordKind.MESSAGE, job=number + 1, frames=frames)


class Written:
    """A log on a disk."""

    def __init__(self, disk=None, start=None):
        self.disk = disk or MemoryDisk()
        self.log = ShardLog(start or LogStart(0, 1, 0, EPOCH))
        self.writer = SegmentWriter(self.disk, 0)

    def append(self, count, **options):
        for _ in range(count):
            self.log.append(record(self.log.end, **options))
        return self

    def write(self):
        while (batch := self.log.pending()) is not None:
            self.writer.write(batch)
            self.writer.sync()
            self.log.synced(batch.upto)
        return self

    def group(self, count, **options):
        """Records that become durable together."""
        return self.append(count, **options).write()


def read(disk, start=None):
    """The numbers of the records that are read, which must be those that were appended; and the reader."""
    reader = LogReader(disk, 0, start)
    first, numbers = reader.end, []
    for placed in reader:
        if placed.record.kind is RecordKind.MESSAGE:
            frames = [bytes(frame) for frame in placed.record.frames]
            expected = record(placed.number, len(frames[-1]))
            assert placed.record._replace(frames=frames) == expected
            numbers.append(placed.number)
    assert reader.end == first + len(numbers)
    return numbers, reader


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_records_come_back_over_segments_and_lives(tmp_path, kind):
    disk = MemoryDisk() if kind == "memory" else DirectoryDisk(tmp_path)
    log = Written(disk).group(3).group(1)
    assert log.log.cut() == (second := Place(2, 4, EPOCH))
    log.group(4, size_bytes=300_000)
    numbers, reader = read(disk)
    assert numbers == list(range(8))
    assert reader.notes == []
    assert read(disk, second)[0] == [4, 5, 6, 7]
    Written(disk, LogStart(0, 3, reader.end, EPOCH + 1, before=reader.epoch)).group(2)
    assert read(disk)[0] == list(range(10))
    assert segments(disk) == {0: [1, 2, 3]}
    disk.delete(segment_name(0, 1))
    assert read(disk, second)[0] == list(range(4, 10))


def test_a_group_is_synced_once_and_known_durable_only_then():
    log = Written()
    log.append(5)
    batch = log.log.pending()
    log.append(2)
    assert (log.log.end, log.log.durable, batch.upto) == (7, 0, 5)
    log.writer.write(batch)
    log.writer.sync()
    log.log.synced(batch.upto)
    assert (log.log.durable, log.disk.syncs) == (5, 2)  # one of them made the file durable
    assert read(log.disk.after_power_loss())[0] == list(range(5))


def test_a_segment_is_synced_before_the_next_exists():
    log = Written().append(2)
    log.log.cut()
    log.append(1)
    assert log.writer.begun == 0
    first = log.log.pending()
    assert (first.segment, first.upto) == (1, 2)
    log.writer.write(first)
    log.writer.sync()
    assert segments(log.disk) == {0: [1]}
    second = log.log.pending()
    assert (second.segment, second.is_new, second.upto) == (2, True, 3)
    assert log.writer.begun == 1
    log.writer.write(second)
    assert log.writer.begun == 2
    assert read(log.disk.after_power_loss(), Place(2, 2, EPOCH))[0] == [2]


def test_a_tail_torn_at_any_byte_is_cut_off():
    """Two groups are durable; the third was being written: each of its records is there as a whole, or not at all."""
    log = Written().group(2).group(1)
    durable_bytes = len(log.disk.files[segment_name(0, 1)])
    log.append(3, size_bytes=20)
    log.writer.write(log.log.pending())
    whole = log.disk.files[segment_name(0, 1)]
    size_bytes = record(3, 20).size_bytes
    for length in range(durable_bytes, len(whole) + 1):
        numbers, reader = read(MemoryDisk({segment_name(0, 1): whole[:length]}))
        left, rest = divmod(length - durable_bytes, size_bytes)
        assert numbers == list(range(3 + left))
        assert bool(reader.notes) == bool(rest)


@pytest.mark.parametrize("marked", [False, True])
def test_a_flipped_bit_anywhere_is_refused_with_file_and_place(marked):
    """Only the last group, without the mark behind it, cannot be told from one that was being written."""
    log = Written().group(1).group(2).group(1)
    if marked:
        log.writer.mark(log.log.durable)
    whole = bytes(log.disk.files[segment_name(0, 1)])
    ends = [len(whole) - HEADER_BYTES] if marked else [len(whole) - record(3).size_bytes]
    for place in range(ends[0]):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DamagedLogError, match=rf"{segment_name(0, 1)} is damaged at byte \d+"):
            read(MemoryDisk({segment_name(0, 1): damaged}))
    for place in range(ends[0], len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        assert read(MemoryDisk({segment_name(0, 1): damaged}))[0] == list(range(4 if marked else 3))


def three_segments(epoch=EPOCH):
    log = Written(start=LogStart(0, 1, 0, epoch)).group(1)
    for _ in range(2):
        log.log.cut()
        log.group(1)
    return {name: bytes(content) for name, content in log.disk.files.items()}


def test_a_missing_or_foreign_segment_is_refused():
    files, others = three_segments(), three_segments(EPOCH + 1)
    first, second, third = sorted(files)
    with pytest.raises(DamagedLogError, match=f"{second} .*missing"):
        read(MemoryDisk({first: files[first], third: files[third]}))
    with pytest.raises(DamagedLogError, match="another segment's"):
        read(MemoryDisk({first: files[first], second: files[third]}))
    with pytest.raises(DamagedLogError, match="does not begin"):
        read(MemoryDisk({first: files[first], second: b"", third: files[third]}))
    # Cut off at the end of a record, so that only the next segment tells.
    with pytest.raises(DamagedLogError, match="records are missing"):
        read(MemoryDisk(files | {second: files[second][: -record(1).size_bytes]}))
    # Of another directory, in the middle and at the end.
    for name in (second, third):
        with pytest.raises(DamagedLogError, match=f"{name} .*another segment's .*'before': {EPOCH}"):
            read(MemoryDisk(files | {name: others[name]}))


def test_the_segment_that_a_generation_goes_on_in_is_there_or_refused():
    """A generation is not kept before, so that no death of a server leaves it without."""
    files, others = three_segments(), three_segments(EPOCH + 1)
    third, place = segment_name(0, 3), Place(3, 2, EPOCH)
    assert read(MemoryDisk(files), place)[0] == [2]
    without = {name: content for name, content in files.items() if name != third}
    for damaged, words in (
        (without, "the file is missing"),
        (files | {third: b""}, "does not begin"),
        (files | {third: files[third][:30]}, "does not begin"),
        (files | {third: others[third]}, f"another segment's .*'epoch': {EPOCH}"),
        ({}, "the file is missing"),
    ):
        with pytest.raises(DamagedLogError, match=f"{third} .*{words}"):
            read(MemoryDisk(damaged), place)


def test_a_file_that_was_being_created_is_named():
    log = Written().group(2)
    for head in (b"", b"PSLG\x01"):
        disk = MemoryDisk({**log.disk.files, segment_name(0, 2): head})
        numbers, reader = read(disk)
        assert (numbers, reader.headless, reader.epoch) == ([0, 1], segment_name(0, 2), EPOCH)


def test_a_full_disk_takes_the_same_batch_later():
    log = Written().group(1)
    used_bytes = sum(map(len, log.disk.files.values()))
    log.disk.capacity_bytes = used_bytes + 50
    log.append(2)
    batch = log.log.pending()
    for _ in range(2):
        with pytest.raises(OSError, match="No space") as error:
            log.writer.write(batch)
        assert error.value.errno == errno.ENOSPC
        assert log.log.durable == 1
    log.disk.capacity_bytes = 1 << 20
    log.writer.write(batch)
    log.writer.sync()
    log.log.synced(batch.upto)
    assert read(log.disk)[0] == [0, 1, 2]


def test_a_failed_sync_is_no_durability():
    log = Written().group(1).append(1)
    log.disk.sync_error = errno.EIO
    batch = log.log.pending()
    log.writer.write(batch)
    with pytest.raises(OSError, match="sync failed"):
        log.writer.sync()
    assert log.log.durable == 1
    assert read(log.disk.after_power_loss())[0] == [0]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["names_error", "sync_error"])
def test_a_segment_whose_beginning_was_not_synced_is_no_full_disk(error, what):
    """The records are in the file: another try would write them twice."""
    disk = MemoryDisk()
    log, writer = ShardLog(LogStart(0, 1, 0, 7)), SegmentWriter(disk, 0)
    setattr(disk, what, error)
    with pytest.raises(OSError, match="it could not be made durable") as failure:
        writer.write(log.pending())
    assert (failure.value.errno, writer.begun) == (errno.EIO, 0)


def test_a_directory_writes_many_pieces_and_names_the_file_in_errors(tmp_path):
    disk = DirectoryDisk(tmp_path)
    file = disk.create("a")
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    file.append(pieces)
    file.append([b"end"])
    file.sync()
    disk.sync_names()
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
