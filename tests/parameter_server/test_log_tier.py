"""A server with ``durability="log"``, killed under load: what it acknowledged is there once, whatever was under way."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.full_disk import fill_up
from support.server_process import SGD, Peer, ServerFailedError, running_server
from support.shard_world import APPLY, Worker, World
from support.shard_world import spec as chunk
from support.waiting import eventually
from support.worker_sessions import entered
from typer.testing import CliRunner

from psengine.cli.server import _serve, build_app
from psengine.errors import ServerRefusedError, SnapshotError
from psengine.parameter_server.client.worker_session import wait_all
from psengine.protocol.messages import DURABILITY_TIERS

LEASE_S = 30.0
# Push n adds 4 ** (n mod 26) to element n // 26: a sum names each push that was lost (digit 0) or doubled (digit 2).
DIGITS = 26
RUNS = [[0, 80, 0]]
OPTIMIZER = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": RUNS}
NUMEL = 80
CHUNKS = 4


class Counter:
    """A worker that pushes to its own chunks until it is told to stop; ``acknowledged``: how many of each."""

    def __init__(self, address: str, rank: int, workers: int) -> None:
        self.keys = [key for key in range(CHUNKS * workers) if key % workers == rank]
        specs = [chunk(key, NUMEL, torch.float64) for key in range(CHUNKS * workers)]
        self.session = entered(address, rank, specs, rule=APPLY, world_size=workers, timeout_s=60.0)
        wait_all([self.session.configure(key, OPTIMIZER) for key in self.keys])
        self.acknowledged = 0
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends.is_set() and self.acknowledged < NUMEL * DIGITS:
                gradient = torch.zeros(NUMEL, dtype=torch.float64)
                gradient[self.acknowledged // DIGITS] = -(4.0 ** (self.acknowledged % DIGITS))
                for push in [self.session.push(key, gradient.clone(), []) for key in self.keys]:
                    assert push.wait().refused is None
                self.acknowledged += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(timeout=70)
        assert self.error is None, self.error

    def lost_and_doubled(self) -> tuple[int, int]:
        lost = doubled = 0
        for key in self.keys:
            values = self.session.pull(key).wait().values
            for n in range(NUMEL * DIGITS):
                digit = int(values[n // DIGITS].item()) // 4 ** (n % DIGITS) % 4
                lost += n < self.acknowledged and digit == 0
                doubled += digit > (n < self.acknowledged)
        return lost, doubled


def kill_again_and_again(directory: Path, kills: int, seed: int, **options) -> tuple[int, int, int]:
    """(acknowledged, lost, doubled) pushes of two workers, whose server was killed at random moments."""
    moments = random.Random(seed)
    options = {"shards": 2, "snapshot_dir": directory / "s", "durability": "log", "lease_s": LEASE_S, **options}
    with ExitStack() as stack:
        server = stack.enter_context(running_server(bind=f"ipc://{directory}/socket", **options))
        workers = [Counter(server.addresses[0], rank, 2) for rank in range(2)]
        for worker in workers:
            stack.callback(worker.session.close)
        for _ in range(kills):
            before = [worker.acknowledged for worker in workers]
            eventually(lambda before=before: all(w.acknowledged > b for w, b in zip(workers, before, strict=True)))
            time.sleep(moments.uniform(0, 0.1))
            server.kill()
            server = stack.enter_context(running_server(bind=server.addresses[0], **options))
        for worker in workers:
            worker.stop()
        found = [worker.lost_and_doubled() for worker in workers]
        for job in server.job("job"):
            assert job["lost_updates"] == 0
        return sum(w.acknowledged for w in workers), sum(f[0] for f in found), sum(f[1] for f in found)


def test_nothing_that_was_acknowledged_is_lost_or_doubled_by_kills(tmp_path):
    acknowledged, lost, doubled = kill_again_and_again(tmp_path, 2, seed=1, snapshot_interval_s=0.2)
    assert acknowledged
    assert (lost, doubled) == (0, 0)


@pytest.mark.slow
def test_nor_by_forty(tmp_path):
    for seed, interval_s in enumerate((0.0, 0.1)):
        (tmp_path / str(seed)).mkdir()
        acknowledged, lost, doubled = kill_again_and_again(
            tmp_path / str(seed), 20, seed, snapshot_interval_s=interval_s
        )
        assert acknowledged
        assert (lost, doubled) == (0, 0)


def push(peer: Peer, *sequences: int) -> None:
    for sequence in sequences:
        answer = peer.request("PUSH", key=0, sequence=sequence, payload=torch.ones(10))
        assert (answer.type.name, answer.version) == ("UPDATED", sequence)


def options_of(directory: Path, **more):
    return {"snapshot_dir": directory, "durability": "log", "snapshot_interval_s": 0.0, "lease_s": LEASE_S, **more}


def psengine_server(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(_serve), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_copy_of_a_running_server_is_one_to_start_from_and_is_shown(tmp_path):
    with running_server(**options_of(tmp_path / "s")) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        push(peer, 1, 2)
        assert peer.request("SNAPSHOT").type.name == "OK"
        push(peer, 3, 4, 5)
        said = psengine_server("backup", str(tmp_path / "s"), str(tmp_path / "copy"))
        push(peer, 6)
        assert "a server would start from generation 1 and these records of the log: 3 of shard 0" in said
        assert "job 'job': async, 1 workers, 1 chunks, versions 5 to 5" in said
        shown = psengine_server("inspect", str(tmp_path / "s"))
        assert "versions 6 to 6" in shown
        assert "segment log-000-000000000002: 1 KiB, from record" in shown
        server.kill()
    # A server of a lower tier takes it over, too.
    with running_server(**options_of(tmp_path / "copy", durability="snapshot")) as server:
        [job] = server.job("job")
        assert (job["version_max"], server.status()["durability"]) == (5, "snapshot")
    # With another number of shards.
    with running_server(**options_of(tmp_path / "s", shards=3)) as server:
        assert max(job["version_max"] for job in server.job("job")) == 6
        server.kill()
    assert "versions 6 to 6" in psengine_server("inspect", str(tmp_path / "s"))


def test_a_damaged_log_is_refused_with_its_place(tmp_path):
    with running_server(**options_of(tmp_path / "s")) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        push(peer, 1, 2, 3)
        server.kill()
    [segment] = (tmp_path / "s").glob("log-*")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    refusal = rf"exit code 4[\s\S]*{segment.name} is damaged at byte \d+"
    with pytest.raises(ServerFailedError, match=refusal), running_server(**options_of(tmp_path / "s")):
        pass
    segment.write_bytes(whole[:-3])
    with running_server(**options_of(tmp_path / "s")) as server:
        assert "are left out" in server.log()
        [job] = server.job("job")
        assert job["version_max"] == 3


@pytest.mark.parametrize("damage", ["removed", "emptied"])
def test_a_log_that_is_gone_is_said(tmp_path, damage):
    with running_server(**options_of(tmp_path / "s")) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        assert peer.request("SNAPSHOT").type.name == "OK"
        push(peer, 1, 2, 3)
        server.kill()
    assert "missing or empty" not in psengine_server("inspect", str(tmp_path / "s"))
    newest = max((tmp_path / "s").glob("log-*"))
    if damage == "removed":
        newest.unlink()
    else:
        newest.write_bytes(b"")
    said = f"{newest.name}, the log from generation 1 on, is missing or empty"
    assert f"left out: {said}" in psengine_server("inspect", str(tmp_path / "s"))
    with running_server(**options_of(tmp_path / "s")) as server:
        assert said in server.log()
        assert server.job("job")[0]["version_max"] == 0


def test_a_directory_of_another_kind_and_an_unreadable_one_are_refused_plainly(tmp_path):
    empty, there = tmp_path / "empty", tmp_path / "there"
    empty.mkdir()
    there.mkdir()
    for source, target, text in (
        (tmp_path / "absent", tmp_path / "copy", "absent is no directory"),
        (empty, tmp_path / "copy", "empty has no generation and no log"),
    ):
        for arguments in (["inspect", str(source)], ["backup", str(source), str(target)]):
            with pytest.raises(SnapshotError, match=text):
                psengine_server(*arguments)
        assert not target.exists()
    unreadable = tmp_path / "unreadable"
    (unreadable / "log-000-000000000001").mkdir(parents=True)
    with pytest.raises(SnapshotError, match="there is there already"):
        psengine_server("backup", str(unreadable), str(there))
    with pytest.raises(SnapshotError, match="log-000-000000000001: Is a directory"):
        psengine_server("inspect", str(unreadable))
    refusal = r"exit code 4[\s\S]*log-000-000000000001 cannot be read: Is a directory"
    with pytest.raises(ServerFailedError, match=refusal), running_server(**options_of(unreadable)):
        pass


def fail_syncs():
    def fail(descriptor):
        if os.path.exists(flag):
            raise OSError(5, "Input/output error")
        real(descriptor)

    real, os.fdatasync, flag = os.fdatasync, fail, os.environ["FAIL_SYNCS"]


def test_a_sync_that_fails_ends_the_server_and_acknowledges_nothing(tmp_path):
    flag = tmp_path / "fail"
    options = options_of(tmp_path / "s", environment={"FAIL_SYNCS": str(flag)}, sabotage=fail_syncs)
    with running_server(**options) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        push(peer, 1)
        flag.touch()
        assert peer.request("PUSH", key=0, sequence=2, payload=torch.ones(10), timeout_s=1.0) is None
        assert server.wait() == 5
        assert "the log of shard 0 cannot be written any more" in server.log()


def test_a_full_disk_stops_acknowledging_says_so_and_goes_on_with_room(tmp_path):
    flag = tmp_path / "full"
    options = options_of(tmp_path / "s", environment={"FULL": str(flag)}, sabotage=fill_up)
    with running_server(**options) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        push(peer, 1)
        flag.touch()
        assert peer.request("PUSH", key=0, sequence=2, payload=torch.ones(10), timeout_s=0.3) is None
        # It lives, and says why it does not answer.
        assert peer.request("HEARTBEAT").type.name == "HEARTBEAT_ACK"
        eventually(lambda: server.status()["logs"][0]["is_full"])
        assert any(event["kind"] == "log_full" for event in server.status()["events"])
        flag.unlink()
        answer = peer.receive(5.0)
        assert (answer.type.name, answer.version) == ("UPDATED", 2)
        eventually(lambda: not server.status()["logs"][0]["is_full"])


def leave_little_room():
    def statvfs(path):
        found = list(real(path)[:10])
        if os.path.exists(flag):
            found[4] = (100 << 20) // found[1]
        return os.statvfs_result(found)

    real, os.statvfs, flag = os.statvfs, statvfs, os.environ["LITTLE"]


def test_a_disk_that_fills_up_is_announced_before_it_is_full(tmp_path):
    flag = tmp_path / "little"
    options = options_of(tmp_path / "s", environment={"LITTLE": str(flag)}, sabotage=leave_little_room)
    with running_server(**options) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        push(peer, 1, 2)
        eventually(lambda: server.status()["logs"][0]["free_bytes"] is not None)
        assert not any(event["kind"] == "log_low" for event in server.status()["events"])
        [before] = (tmp_path / "s").glob("log-*")
        flag.touch()
        # Nobody pushes: the room is looked at all the same, and a snapshot lets the older segment go.
        eventually(lambda: any(event["kind"] == "log_low" for event in server.status()["events"]))
        eventually(lambda: server.status()["snapshot"]["generation"] == 1)
        eventually(lambda: not before.exists())
        [log] = server.status()["logs"]
        assert (log["is_full"], log["free_bytes"] >> 20) == (False, 100)
        assert "the log's disk is almost full (expected 1024 MiB of room, got 100)" in server.log()
        push(peer, 3)


@pytest.mark.parametrize("offered", DURABILITY_TIERS)
@pytest.mark.parametrize("wanted", DURABILITY_TIERS)
def test_a_job_that_asks_for_more_than_is_offered_is_refused(offered, wanted):
    world = World(durability=offered)
    worker = Worker(world, 0, rule={**APPLY, "durability": wanted})
    state = worker.hello()
    [answer] = worker.take()
    if DURABILITY_TIERS.index(wanted) > DURABILITY_TIERS.index(offered):
        assert state == "rule_mismatch"
        text = f"durability={wanted} (expected a server that offers at least that, got {offered})"
        assert text in answer.body["text"]
    else:
        assert (state, answer.body["durability"]) == ("initialise", offered)


def test_a_server_with_an_older_state_than_was_acknowledged_serves_nobody(tmp_path):
    """It was started again with a copy from before: its workers know better."""
    address = f"ipc://{tmp_path}/socket"
    with ExitStack() as stack:
        server = stack.enter_context(running_server(bind=address, **options_of(tmp_path / "s")))
        session = entered(address, 0, [chunk(0)], rule=APPLY, timeout_s=20.0)
        stack.callback(session.close)
        session.configure(0, {**OPTIMIZER, "runs": [[0, 4, 0]]}).wait()
        for number in range(4):
            session.push(0, torch.ones(4), []).wait()
            if number == 1:
                psengine_server("backup", str(tmp_path / "s"), str(tmp_path / "old"))
        server.kill()
        server = stack.enter_context(running_server(bind=address, **options_of(tmp_path / "old")))
        with pytest.raises(ServerRefusedError, match=r"older state of job 'job'[\s\S]*--snapshot-dir of before"):
            session.push(0, torch.ones(4), []).wait()
        with Peer(server.addresses[0]) as peer:
            assert peer.hello().body["code"] == "state_lost"
