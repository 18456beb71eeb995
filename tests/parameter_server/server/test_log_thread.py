"""A shard's log on real files: what is acknowledged is where a restart finds it, and a full disk can be cleared."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from support.waiting import eventually

from psengine.parameter_server.server.durability import log_thread
from psengine.parameter_server.server.durability.log_thread import LogThreads
from psengine.parameter_server.server.log.disk import DirectoryDisk
from psengine.parameter_server.server.log.log import ShardLog
from psengine.parameter_server.server.log.reading import LogReader
from psengine.parameter_server.server.log.records import Record, RecordKind

DEADLINE_S = 20.0


class Written:
    """A log that runs."""

    def __init__(self, directory):
        self.disk, self.noted, self.count, self.wakes = DirectoryDisk(directory), [], 0, []
        answers = SimpleNamespace(wake=lambda: self.wakes.append(1))
        log = ShardLog(self.disk, 0, 7)
        self.thread = LogThreads(log, answers, lambda kind, text: self.noted.append(kind), lambda: 1 << 40)

    def append(self, count=1, size_bytes=100):
        for _ in range(count):
            self.thread.log.append(Record(RecordKind.MESSAGE, self.count, [bytes(size_bytes)]))
            self.count += 1

    def settle(self):
        """Until all that was appended is acknowledged."""
        eventually(lambda: self.thread.log.durable == self.thread.log.end)

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
        assert log.wakes
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
        eventually(lambda: log.thread.log.failure)
        assert "the log of shard 0 cannot be written any more" in log.thread.log.failure
        assert log.noted == ["log_failed"]
        assert log.thread.log.durable == 4
        monkeypatch.setattr(log_thread, "LOOK_S", 0.02)
