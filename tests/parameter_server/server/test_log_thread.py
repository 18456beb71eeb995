"""A shard's log on real files: what is acknowledged is where a restart finds it, and a full disk can be cleared."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from psengine.parameter_server.server.durability import log_thread
from psengine.parameter_server.server.durability.log_thread import LogThreads
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import Record, RecordKind

DEADLINE_S = 20.0
ROOM_BYTES = 1 << 40


class Answers:
    """In the place of ``HeldAnswers``."""

    def __init__(self):
        self.changed = threading.Condition()
        self.wakes = 0

    def wake(self):
        with self.changed:
            self.wakes += 1
            self.changed.notify_all()


class Room(DirectoryDisk):
    """A directory that says how much room there is."""

    bytes_left = ROOM_BYTES

    def free_bytes(self):
        return self.bytes_left


class Written:
    """A log that runs."""

    def __init__(self, directory):
        self.disk, self.answers, self.noted, self.count = Room(directory), Answers(), [], 0
        self.thread = LogThreads(
            ShardLog(self.disk, 0, 7),
            self.answers,
            lambda kind, text: self.noted.append((kind, text)),
            self.disk.free_bytes,
        )

    def append(self, count=1, size_bytes=100):
        for _ in range(count):
            self.thread.log.append(Record(RecordKind.MESSAGE, self.count, [bytes(size_bytes)]))
            self.count += 1

    def until(self, is_so):
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def settle(self):
        """Until all that was appended is acknowledged."""
        self.until(lambda: self.thread.log.durable == self.thread.log.end)

    def kinds(self):
        return [kind for kind, _ in self.noted]

    def read(self):
        reader = LogReader(DirectoryDisk(self.disk.directory), 0, None, [])
        return [record.job for record in reader]


@contextmanager
def running(directory):
    written = Written(directory)
    try:
        yield written
    finally:
        written.thread.end(DEADLINE_S)
        assert written.thread.log._file is None


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(log_thread, "LOOK_S", 0.02)


def test_a_sync_while_a_segment_gets_its_name_succeeds(tmp_path, monkeypatch):
    def rename(*names):
        real(*names)
        syncs.append(pool.submit(log.sync))
        time.sleep(0.1)

    real, syncs, log = os.rename, [], ShardLog(DirectoryDisk(tmp_path), 0, 7)
    monkeypatch.setattr(os, "rename", rename)
    with ThreadPoolExecutor(1) as pool:
        log.write()
        [sync] = syncs
        sync.result(DEADLINE_S)
    log.close()


@pytest.mark.usefixtures("quick")
def test_what_was_acknowledged_is_read_back(tmp_path):
    with running(tmp_path) as log:
        for count in (1, 3, 40):
            log.append(count)
            log.settle()
        place = log.thread.log.cut()
        log.thread.await_begun(place.segment, DEADLINE_S)
        log.append(2)
        log.settle()
        assert log.read() == list(range(46))
        assert log.answers.wakes
        status = log.thread.status(None)
        assert (status.waiting_records, status.is_full) == (0, False)
    assert log.noted == []


def remove(directory):
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def replace_the_file(directory):
    [file] = directory.iterdir()
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


@pytest.mark.parametrize("injure", [remove, replace_the_file])
@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.usefixtures("quick")
def test_nothing_is_acknowledged_into_a_file_that_nobody_finds(tmp_path, injure, is_idle, monkeypatch):
    directory = tmp_path / "s"
    directory.mkdir()
    with running(directory) as log:
        log.append(3)
        log.settle()
        if not is_idle:
            monkeypatch.setattr(log_thread, "LOOK_S", DEADLINE_S)  # the next look comes after the next record
            time.sleep(0.1)
        injure(directory)
        if not is_idle:
            log.append(1)
        log.until(lambda: log.thread.log.failure)
        assert "the log of shard 0 cannot be written any more" in log.thread.log.failure
        assert log.kinds() == ["log_failed"]
        assert log.thread.log.durable == 4
        monkeypatch.setattr(log_thread, "LOOK_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_room_for_a_snapshot_is_left_and_a_cut_goes_on(tmp_path):
    with running(tmp_path) as log:
        log.append(2)
        log.settle()
        log.disk.bytes_left = 50
        log.append(3)
        log.until(lambda: log.kinds() == ["log_full"])
        assert log.thread.is_full
        assert log.thread.log.durable == 3
        # A snapshot: what came before it is written, so that its segment begins; what comes after waits for room.
        place = log.thread.log.cut()
        log.append(1)
        log.thread.await_begun(place.segment, DEADLINE_S)
        log.append(1)
        log.until(lambda: log.thread.log.durable >= 7)
        log.disk.bytes_left = ROOM_BYTES
        log.settle()
        log.until(lambda: "log_room" in log.kinds())
        assert log.read() == list(range(7))
