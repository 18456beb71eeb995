"""The write-ahead log of a shard, without threads: what was durable comes back, or an error names the place."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from psengine.errors import SnapshotError
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import BEGINNING, Place, ShardLog, segment_name
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import Record, RecordKind

EPOCH = 7
FIRST, SECOND, THIRD = (segment_name(0, number) for number in (1, 2, 3))


@pytest.fixture
def disk(tmp_path):
    return DirectoryDisk(tmp_path)


def files_of(disk):
    return {path.name: path.read_bytes() for path in disk.directory.iterdir()}


def with_files(disk, files):
    """The disk, which has these files and no others."""
    for name in disk.list():
        disk.delete(name)
    for name, content in files.items():
        (disk.directory / name).write_bytes(content)
    return disk


def record(number, size_bytes=5):
    frames = [f"update {number}".encode(), bytes(size_bytes)]
    return Record(RecordKind.MESSAGE, job=number + 1, frames=frames)


class Written:
    """A log on a disk. Each segment's first record describes it, so the first update of all has the number 1."""

    def __init__(self, disk, epoch=EPOCH, last=BEGINNING):
        self.disk = disk
        self.log = ShardLog(self.disk, 0, epoch, last)

    def append(self, count, **options):
        for _ in range(count):
            self.log.append(record(self.log.end, **options))
        return self

    def group(self, count, **options):
        """Records that become durable together."""
        self.append(count, **options)
        while self.log.has_unwritten:
            self.log.write()
            self.log.sync()
        return self


def read(disk, start=None):
    """The numbers of the updates that are read, which must be those that were appended; the end, and notes."""
    numbers, notes = [], []
    reader = LogReader(disk, 0, start, notes)
    for one in reader:
        frames = [bytes(frame) for frame in one.frames]
        assert one._replace(frames=frames, number=0, durable=0) == record(one.number, len(frames[-1]))
        numbers.append(one.number)
    return numbers, reader.end, notes


def test_a_flipped_bit_anywhere_is_refused_with_file_and_place(disk):
    """Only the last group cannot be told from one that was being written."""
    Written(disk).group(1).group(2).group(1)
    whole = files_of(disk)[FIRST]
    end = len(whole) - record(4).size_bytes
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with_files(disk, {FIRST: damaged})
        if place < end:
            with pytest.raises(SnapshotError, match=rf"{FIRST} is damaged at byte \d+"):
                read(disk)
        else:
            assert read(disk)[0] == [1, 2, 3]


def three_segments(disk, epoch):
    log = Written(with_files(disk, {}), epoch).group(1)
    for _ in range(2):
        log.log.cut()
        log.group(1)
    return files_of(disk)


def test_a_missing_or_foreign_segment_is_refused(disk):
    files, others = three_segments(disk, EPOCH), three_segments(disk, EPOCH + 1)
    # A generation is not kept before the segment that it goes on in, so that no death of a server leaves it without.
    place = Place(3, 4, EPOCH)
    assert read(with_files(disk, files), place)[0] == [5]
    for start, name, content, words in (
        (None, SECOND, None, "missing"),
        (None, SECOND, files[THIRD], "another segment's"),
        (None, SECOND, b"", "does not begin"),
        # Cut off at the end of a record, so that only the next segment tells.
        (None, SECOND, files[SECOND][: -record(3).size_bytes], "records are missing"),
        # Of another directory, in the middle and at the end.
        (None, SECOND, others[SECOND], f"another segment's .*'before': {EPOCH}"),
        (None, THIRD, others[THIRD], f"another segment's .*'before': {EPOCH}"),
        (place, THIRD, None, "the file is missing"),
        (place, THIRD, files[THIRD][:30], "does not begin"),
        (place, THIRD, others[THIRD], f"another segment's .*'epoch': {EPOCH}"),
    ):
        damaged = {**files, name: content}
        if content is None:
            del damaged[name]
        with pytest.raises(SnapshotError, match=words):
            read(with_files(disk, damaged), start)


def test_a_sync_while_a_segment_gets_its_name_succeeds(disk, monkeypatch):
    def rename(*names):
        real(*names)
        syncs.append(pool.submit(log.sync))
        time.sleep(0.1)

    real, syncs, log = os.rename, [], ShardLog(disk, 0, EPOCH)
    monkeypatch.setattr(os, "rename", rename)
    with ThreadPoolExecutor(1) as pool:
        log.write()
        [sync] = syncs
        sync.result(20.0)
    log.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["fsync", "fdatasync"])
def test_what_was_not_synced_is_no_full_disk(disk, monkeypatch, number, what):
    """The records are in the file: another try would write them twice. And nobody finds a part of a file."""
    renamed, rename = [], os.rename

    def fail(descriptor):
        raise OSError(number, "failed")

    monkeypatch.setattr(os, what, fail)
    monkeypatch.setattr(os, "rename", lambda *names: renamed.append(rename(*names)))
    log = ShardLog(disk, 0, EPOCH)
    with pytest.raises(OSError, match="it could not be made durable: failed") as failure:
        log.write()
    assert (failure.value.errno, log.begun) == (errno.EIO, 0)
    assert len(renamed) == (what == "fsync"), "a file has its name once it is durable, and then its directory is"
    log.close()
    assert disk.list() == []


def test_a_directory_writes_many_pieces_and_names_the_file_in_errors(disk, tmp_path):
    file = disk.create("a")
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    file.append(pieces)
    file.append([b"end"])
    assert disk.list() == ["unfinished-a"]
    file.commit()
    assert disk.read("a", 0, 1 << 20) == b"".join(pieces) + b"end"
    assert disk.size_bytes("a") == sum(map(len, pieces)) + 3
    file.close()
    with pytest.raises(OSError, match="Bad file") as error:
        file.append([b"x"])
    assert error.value.filename == str(tmp_path / "a")
