"""What a server is durable to: that it is there, whose it is, that it fits, and when a new one is worth writing."""

import errno
import os
import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.server_process import Peer, running_server
from support.shard_world import APPLY, Worker, World, spec, team
from support.waiting import eventually
from support.worker_sessions import entered
from typer.testing import CliRunner

from psengine.cli.server import _serve, build_app
from psengine.errors import SnapshotError
from psengine.parameter_server.server.durability import log_thread, tier
from psengine.parameter_server.server.durability.inspection import back_up, inspect
from psengine.parameter_server.server.durability.tier import Durability
from psengine.parameter_server.server.log import disk as disks
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.snapshots.generations import Generations
from psengine.protocol.layout import job_number
from psengine.protocol.messages import NOBODY, MessageType

INTERVAL_S = 0.05
DEADLINE_S = 20.0


class Thread:
    """In the place of a shard's thread: calls what it is asked at once, in whoever asks."""

    ident = None

    def __init__(self, shard, coordinators):
        self.shard, self.coordinators, self.lock = shard, coordinators, threading.Lock()
        self.answers, self.known = SimpleNamespace(wake=lambda: None), {}

    def add_sink(self, log):
        self.shard.append = log.append

    def ask(self, function):
        future = Future()
        with self.lock:
            future.set_result(function())
        return future


class Server:
    """Shards without sockets, over a directory."""

    def __init__(self, directory, *, keeps_log=False, is_copy=False, interval_s=0.0, shards=1, epoch=7, **settings):
        self.stack, self.events = ExitStack(), []
        self.world = World(shards=shards, epoch=epoch, **settings)
        kept = {"durability": "log" if keeps_log else "snapshot", "snapshot_interval_s": interval_s}
        given = ServerSettings(snapshot_dir=directory, **kept)
        self.durability = Durability(given, self.stack, lambda *event: self.events.append(event))
        self.restored = []  # of coordinators
        self.coordinators = SimpleNamespace(to_meta=lambda: {"jobs": len(self.restored)})
        try:
            self.line = self.durability.restore(self.world.shards, epoch)
            self.restored += [self.durability.known] if self.durability.known else []
            self.threads = [Thread(shard, None if shard.index else self.coordinators) for shard in self.world.shards]
            self.durability.begin(self.threads, epoch, is_copy=is_copy)
        except BaseException:
            self.stack.close()
            raise
        for thread in self.threads:
            thread.ident = 1

    def snapshot(self):
        return self.durability.snapshot().result(DEADLINE_S)

    def settle(self):
        """Until all that happened may be acknowledged."""
        eventually(lambda: all(log.log.durable == log.log.end for log in self.durability.logs))

    def end(self):
        """The process has died: nothing more is written, and its locks go."""
        self.durability.end()
        self.durability.end_logs()
        self.stack.close()

    @property
    def version(self):
        return max((job.version for shard in self.world.shards for job in shard.jobs.values()), default=None)


@contextmanager
def server(directory, **options):
    one = Server(directory, **options)
    try:
        yield one
    finally:
        one.end()


def with_job(one, rule=APPLY, numel=10):
    return team(one.world, 1, [spec(0, numel)], rule=rule)[0]


def push(worker, *steps):
    for step in steps:
        worker.push(0, step, torch.ones(10))


def generations(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("generation-")) for path in directory.glob("generation-*"))


def await_looks(one):
    """Until it has found some times that nothing has changed."""
    for _ in range(4):
        eventually(lambda before=one.durability._current_s: one.durability._current_s != before)


def test_an_idle_server_writes_nothing(tmp_path):
    with server(tmp_path / "s", interval_s=INTERVAL_S) as one:
        worker = with_job(one)
        eventually(lambda: one.durability.snapshot_status().generation is not None and one.durability._current())
        generation = one.durability.snapshot_status().generation
        worker.pull(0)
        Worker(one.world).resume()
        await_looks(one)
        assert one.snapshot() == generation  # nor on wish
        push(worker, 1)
        eventually(lambda: one.durability.snapshot_status().generation == generation + 1)
        assert one.snapshot() == generation + 1
    with server(tmp_path / "s", interval_s=INTERVAL_S) as one:
        await_looks(one)
        assert one.durability.snapshot_status().generation == generation + 1
        assert one.restored == [{"jobs": 0}]


def test_all_who_ask_while_a_snapshot_is_written_share_the_next_one(tmp_path, monkeypatch):
    rename, begun, may_end = os.rename, threading.Event(), threading.Event()

    def slow(source, target, **options):
        begun.set()
        assert may_end.wait(DEADLINE_S)
        rename(source, target, **options)

    with server(tmp_path / "s") as one:
        monkeypatch.setattr(os, "rename", slow)
        worker = with_job(one)
        first = one.durability.snapshot()
        assert begun.wait(DEADLINE_S)
        wishes = []
        for step in range(1, 101):
            push(worker, step)
            wishes.append(one.durability.snapshot())
        may_end.set()
        assert first.result(DEADLINE_S) == 1
        assert {wish.result(DEADLINE_S) for wish in wishes} == {2}
    with server(tmp_path / "s") as one:
        assert one.line.endswith("generation 2 (demo version 100)")


CHANGES = {
    "PUSH": lambda world, worker: worker.push(0, 1, torch.ones(10)),
    "STORE": lambda world, worker: worker.ask(MessageType.STORE, key=0, payload=torch.ones(10), version=1),
    "VIEW": lambda world, worker: world.publish([], forwarded_by=[worker]),
    "forget": lambda world, worker: world.shard.drop(job_number("demo")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_snapshot_keeps_counts_as_a_change(tmp_path, change):
    with server(tmp_path / "s") as one:
        assert one.snapshot() == 1
        worker = with_job(one)
        assert one.snapshot() == one.snapshot() == 2
        CHANGES[change](one.world, worker)
        assert one.snapshot() == 3
    with server(tmp_path / "s") as one:
        assert one.line.endswith(f"generation 3 ({'no job' if change == 'forget' else f'demo version {one.version}'})")


def test_a_copy_of_a_running_server_is_one_to_start_from_and_is_shown(tmp_path):
    directory = tmp_path / "s"
    with server(directory, keeps_log=True) as one:
        worker = with_job(one)
        push(worker, 1, 2)
        assert one.snapshot() == 2
        push(worker, 3, 4, 5)
        one.settle()
        said = "\n".join(back_up(directory, tmp_path / "copy"))
        push(worker, 6)
        one.settle()
        assert "a server would start from generation 2 and 3 records of the log (demo version 5)" in said
        shown = "\n".join(inspect(directory))
        assert "and 4 records of the log (demo version 6)" in shown
        assert re.search(r"generation-000000000002: \d KiB\n(.*\n)*log-000-000000000002: \d KiB", shown)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "generation-000000000002",
        "log-000-000000000002",
    ]
    with server(tmp_path / "copy", epoch=8) as one:
        assert one.version == 5
    with server(directory, keeps_log=True, epoch=8) as one:
        assert one.version == 6


@pytest.mark.parametrize("keeps_log", [False, True])
def test_a_life_comes_after_those_before_whatever_the_clock_shows(tmp_path, keeps_log):
    epochs = []
    for clock in (1 << 60, 1 << 50, 5):
        with server(tmp_path, keeps_log=keeps_log, epoch=clock) as one:
            epochs.append(one.durability.epoch)
    assert epochs[0] == 1 << 60
    assert epochs == sorted(set(epochs))
    assert [one.name for one in tmp_path.glob("life-*")] == [f"life-{epochs[-1]}"]


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_directory_that_takes_a_copy_or_starts_without_its_log_keeps_nothing_from_before(tmp_path, is_copy):
    with server(tmp_path / "s", keeps_log=True) as one:
        push(with_job(one), 1, 2)
        one.snapshot()
    if not is_copy:
        (tmp_path / "s" / "start-without-log").touch()
    with server(tmp_path / "s", keeps_log=True, is_copy=is_copy, epoch=8) as one:
        there = sorted(path.name for path in (tmp_path / "s").iterdir())
        life = f"life-{one.durability.epoch}"
        assert there == ["generation-000000000003", life, "lock", "log-000-000000000003"]


def test_a_death_before_a_copys_first_generation_leaves_what_was_there(tmp_path, monkeypatch):
    """The log that the copy began does not go on from it."""
    with server(tmp_path, keeps_log=True) as one:
        push(with_job(one), 1, 2)
        one.snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(Generations, "save", Mock(side_effect=SnapshotError("dies")))
        with pytest.raises(SnapshotError, match="dies"):
            Server(tmp_path, keeps_log=True, is_copy=True, epoch=8)
    for epoch in (9, 10):
        with server(tmp_path, keeps_log=True, epoch=epoch) as one:
            assert one.version == 2


def quicken(monkeypatch):
    for module in (log_thread, tier):
        monkeypatch.setattr(module, "LOOK_S", 0.02)


def test_a_snapshot_is_asked_for_as_long_as_there_is_little_room(tmp_path, monkeypatch):
    room = Mock(return_value=tier.LOW_BYTES - 1)
    monkeypatch.setattr(disks.DirectoryDisk, "free_bytes", room)
    monkeypatch.setattr(tier, "LOW_REPEAT_S", 0.05)
    quicken(monkeypatch)
    with server(tmp_path / "s", keeps_log=True) as one:
        eventually(lambda: [kind for kind, _ in one.events].count("log_low") >= 3)
        assert one.durability.log_status()[0].free_bytes == room.return_value
        room.return_value = 1 << 40
        eventually(lambda: one.durability.log_status()[0].free_bytes == room.return_value)
        told, looks = len(one.events), room.call_count
        eventually(lambda: room.call_count > looks + 10)
        assert len(one.events) == told


def test_a_full_disk_goes_on_once_a_snapshot_has_freed_it(tmp_path, monkeypatch):
    """The log leaves room for a generation, whose predecessor and whose log then go."""
    disk_bytes = 8 << 20

    def free_bytes(disk):
        sizes = []
        for path in disk.directory.iterdir():
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return disk_bytes - sum(sizes)

    monkeypatch.setattr(disks.DirectoryDisk, "free_bytes", free_bytes)
    quicken(monkeypatch)
    numel = 100_000
    with server(tmp_path / "s", keeps_log=True) as one:
        worker = with_job(one, numel=numel)
        for step in range(1, 61):
            worker.push(0, step, torch.ones(numel))
            one.settle()
        kinds = [kind for kind, _ in one.events]
        assert "log_full" in kinds
        assert kinds.count("snapshot") > 3
        assert kinds.index("log_low") < kinds.index("log_room")
    with server(tmp_path / "s", keeps_log=True, epoch=8) as one:
        assert one.version == 60


def test_a_start_on_a_full_disk_says_what_it_needs(tmp_path, monkeypatch):
    directory = tmp_path / "s"
    with server(directory, keeps_log=True) as one:
        push(with_job(one), 1)
        one.settle()

    def full(self, pieces):
        raise OSError(errno.ENOSPC, "No space left on device", self._path)

    monkeypatch.setattr(disks.DirectoryFile, "append", full)
    monkeypatch.setattr(disks.DirectoryDisk, "free_bytes", lambda self: 0)
    monkeypatch.setattr(tier, "START_S", 0.3)
    words = r"cannot begin segment 2: its disk is full. .*expected room for \d+ bytes in .*, got 0\). Fix: delete other"
    with pytest.raises(SnapshotError, match=words):
        Server(directory, keeps_log=True, epoch=8)
    monkeypatch.undo()
    with server(directory, keeps_log=True, epoch=9) as one:
        assert one.version == 1


def replace_files(directory):
    for path in directory.iterdir():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)


@pytest.mark.parametrize("injure", [shutil.rmtree, replace_files])
@pytest.mark.parametrize("is_idle", [False, True])
def test_nothing_is_acknowledged_into_a_file_that_nobody_finds(tmp_path, monkeypatch, injure, is_idle):
    quicken(monkeypatch)
    if not is_idle:
        monkeypatch.setattr(log_thread, "LOOK_S", DEADLINE_S)  # the next look comes after the next record
    directory = tmp_path / "s"
    with server(directory, keeps_log=True) as one:
        worker, [log] = with_job(one), one.durability.logs
        push(worker, 1)
        one.settle()
        durable = log.log.durable
        injure(directory)
        if not is_idle:
            push(worker, 2)
        eventually(lambda: log.log.failure)
        why = "No such file" if injure is shutil.rmtree else "was replaced"
        assert re.search(f"the log of shard 0 cannot be written any more: .*{why}.*'{directory}", log.log.failure)
        assert "log_failed" in [kind for kind, _ in one.events]
        assert log.log.durable == durable
        quicken(monkeypatch)


def test_what_is_gone_is_not_what_a_server_is_durable_to(tmp_path):
    directory = tmp_path / "s"
    with server(directory, shards=2) as one:
        with_job(one)
        assert one.snapshot() == 1
        shutil.rmtree(directory)
        with pytest.raises(SnapshotError, match=r"No such file or directory.* there is no older one"):
            one.snapshot()
        assert one.durability.snapshot_status().generation is None
        directory.mkdir()
        generation = one.snapshot()
        assert generations(directory) == [generation]


def test_a_directory_of_another_kind_and_an_unreadable_one_are_refused_plainly(tmp_path):
    empty, there = tmp_path / "empty", tmp_path / "there"
    empty.mkdir()
    there.mkdir()
    for source in (tmp_path / "absent", empty):
        for lines in (inspect(source), back_up(source, tmp_path / "copy")):
            with pytest.raises(SnapshotError, match=f"{source} has no generation and no log"):
                list(lines)
        assert not (tmp_path / "copy").exists()
    unreadable = tmp_path / "unreadable"
    (unreadable / "log-000-000000000001").mkdir(parents=True)
    with pytest.raises(SnapshotError, match="there is there already"):
        list(back_up(unreadable, there))
    with pytest.raises(SnapshotError, match="log-000-000000000001: Is a directory"):
        CliRunner().invoke(build_app(_serve), ["inspect", str(unreadable)], catch_exceptions=False)
    with pytest.raises(SnapshotError, match="log-000-000000000001 cannot be used: Is a directory"):
        Server(unreadable, keeps_log=True)


def test_backups_beyond_the_memory_do_not_keep_a_server_from_starting_again(tmp_path):
    rule = APPLY | {"delay_compensation": 0.04}
    with server(tmp_path / "s", max_memory_bytes=64) as one:
        workers = team(one.world, 8, [spec(0, 4)], rule=rule)
        for worker in workers:
            worker.pull(0)
        assert one.world.shard.memory_bytes() > 64
        assert one.snapshot() == 1
    with server(tmp_path / "s", max_memory_bytes=64) as one:
        assert one.world.shard.memory_bytes() > 64


def logging_server(directory, **options):
    given = {"snapshot_dir": directory, "durability": "log", "snapshot_interval_s": 0.0, "lease_s": 30.0, **options}
    return running_server(**given)


def acknowledged(peer, *steps):
    for step in steps:
        answer = peer.request("PUSH", key=0, sequence=step, payload=torch.ones(10))
        assert (answer.type.name, answer.version) == ("UPDATED", step)


def fail(name, number, flag):
    """``os``'s function fails as long as there is this file."""

    def failing(*arguments):
        if os.path.exists(flag):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    real = getattr(os, name)
    setattr(os, name, failing)


def test_a_full_disk_stops_acknowledging_and_everything_else_is_answered(tmp_path):
    flag = tmp_path / "full"
    options = {"sabotage": partial(fail, "pwritev", errno.ENOSPC, str(flag))}
    with logging_server(tmp_path / "s", **options) as one, Peer(one.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        acknowledged(peer, 1)
        flag.touch()
        assert peer.request("PUSH", key=0, sequence=2, payload=torch.ones(10), timeout_s=0.3) is None
        eventually(lambda: one.status()["logs"][0]["is_full"])
        assert any(event["kind"] == "log_full" for event in one.status()["events"])
        assert peer.request("WAITS", key=0, sequence=2).body == {"waiting_for": [], "log": True}
        with Peer(one.addresses[0]) as reader:  # says nothing of what is not durable
            reader.rank = NOBODY
            assert reader.request("RESUME", body={}).type.name == "RESUMED"
            assert reader.request("STATUS").type.name == "STATUS_REPORT"
            assert reader.request("ECHO", payload=torch.ones(3)).type.name == "ECHOED"
            assert reader.request("PULL", key=0, sequence=1, timeout_s=0.3) is None
            assert reader.request("WAITS", key=0, sequence=1).body == {"waiting_for": [], "log": True}
        assert peer.request("HEARTBEAT", body={"completed": 0}).type.name == "OK"
        assert peer.request("LEAVE", body={"completed": 2}, timeout_s=0.5) is None  # what coordinators decide waits too
        flag.unlink()
        answer = peer.receive()
        assert (answer.type.name, answer.version, peer.receive().type.name) == ("UPDATED", 2, "OK")
        eventually(lambda: not one.status()["logs"][0]["is_full"])


def test_no_step_comes_before_a_first_snapshot_that_the_disk_took(tmp_path, caplog):
    flag = tmp_path / "full"
    flag.touch()
    full = partial(fail, "pwritev", errno.ENOSPC, str(flag))
    with running_server(snapshot_dir=str(tmp_path / "s"), sabotage=full) as one, ThreadPoolExecutor() as pool:
        entering = pool.submit(entered, one.addresses, 0, [spec(0, 10)], rule=APPLY)
        eventually(lambda: "refused the first snapshot of job 'job' (snapshot_failed)" in caplog.text)
        assert "No space left on device" in caplog.text
        assert (one.status()["snapshot"]["generation"], entering.done()) == (None, False)
        flag.unlink()
        with closing(entering.result(DEADLINE_S)):
            assert one.status()["snapshot"]["generation"]


def test_a_log_that_fails_ends_the_server_and_acknowledges_nothing(tmp_path):
    flag = tmp_path / "fail"
    options = {"sabotage": partial(fail, "fdatasync", errno.EIO, str(flag))}
    with logging_server(tmp_path / "s", **options) as one, Peer(one.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        acknowledged(peer, 1)
        flag.touch()
        assert peer.request("PUSH", key=0, sequence=2, payload=torch.ones(10), timeout_s=1.0) is None
        assert one.wait() == 5
        assert "the log of shard 0 cannot be written any more" in one.log()
