"""What a server is durable to: that it is there, whose it is, that it fits, and when a new one is worth writing."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.server_process import Peer, ServerFailedError, running_server
from support.shard_world import APPLY, AVERAGE, SGD, Worker, World, spec, team
from support.waiting import eventually

from psengine.errors import SnapshotError
from psengine.parameter_server.server.interfaces import ShardSettings
from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.durability import snapshot_thread as durability
from psengine.parameter_server.server.durability.restoring import restore
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.protocol.messages import MessageType

INTERVAL_S = 0.1
# Longer than any test: nobody is evicted, which would be a change.
LEASE_S = 120.0


def generations(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("generation-*"))


def wait_out(server, intervals=2):
    """So many times it has written a snapshot on its interval, or found that it need not."""
    ages = []

    def began_anew():
        ages.append(server.status()["snapshot"]["age_s"])
        return len(ages) > 1 and ages[-1] is not None and (ages[-2] is None or ages[-1] < ages[-2])

    for _ in range(intervals):
        eventually(began_anew)


# ---- nothing changes, nothing is written -----------------------------------------------------------------------------


def test_an_idle_server_writes_nothing(tmp_path):
    options = {"snapshot_dir": tmp_path / "s", "snapshot_interval_s": INTERVAL_S, "lease_s": LEASE_S}
    with running_server(**options) as server:
        with Peer(server.addresses[0]) as peer, Peer(server.addresses[0]) as onlooker:
            peer.make_job(torch.zeros(10))
            generation = peer.request("SNAPSHOT").body["generation"]
            assert onlooker.hello(role="reader").type.name == "WELCOME"
            for _ in range(2):
                assert peer.request("HEARTBEAT").type.name == "HEARTBEAT_ACK"
                assert peer.request("LIST", body={"after": -1}).type.name == "CHUNKS"
                wait_out(server, 1)
            assert server.status()["snapshot"]["generation"] == generation
            assert peer.request("PUSH", key=0, sequence=1, payload=torch.ones(10)).type.name == "UPDATED"
            eventually(lambda: server.status()["snapshot"]["generation"] == generation + 1)
            wait_out(server)
            # Nor on wish: what is durable already is the answer.
            assert [peer.request("SNAPSHOT").body["generation"] for _ in range(3)] == [generation + 1] * 3
        server.kill()
    with running_server(**options) as server:
        wait_out(server)
        assert server.status()["snapshot"]["generation"] == generation + 1


def slow_commits():
    rename = os.rename

    def slow(source, target, **options):
        time.sleep(0.3)
        rename(source, target, **options)

    os.rename = slow


def test_all_who_ask_while_a_snapshot_is_written_share_the_next_one(tmp_path):
    options = {"snapshot_dir": tmp_path / "s", "snapshot_interval_s": 0.0, "sabotage": slow_commits}
    with running_server(**options) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        asked = []
        for count in range(1, 101):
            peer.send(peer.message("PUSH", key=0, sequence=count, payload=torch.ones(10)))
            peer.send(peer.message("SNAPSHOT", sequence=1000 + count))
            asked.append(1000 + count)
        answers = [peer.receive() for _ in range(200)]
        told = {one.sequence: one.body["generation"] for one in answers if one.type.name == "OK"}
        assert sorted(told) == asked
        assert told[1001] == 1
        last = told[asked[-1]]
        assert set(told.values()) <= {1, 2}  # the first may begin before the others are read
        assert last == max(told.values())
        server.kill()
    with running_server(**options) as server:
        assert server.lines[1].endswith(f"generation {last} (job version 100)")


def slow_commits_for_a_few():
    slow_commits()
    durability.MAX_WISHES = 50


def test_wishes_that_wait_do_not_hold_up_the_end(tmp_path):
    """Many more than the server remembers; those beyond are refused at once."""
    options = {"snapshot_dir": tmp_path / "s", "snapshot_interval_s": 0.0, "sabotage": slow_commits_for_a_few}
    with running_server(**options) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        for _ in range(1000):
            peer.send(peer.message("PULL", key=0))
            peer.send(peer.message("SNAPSHOT"))
        refused = 0
        while not refused:
            answer = peer.receive()
            refused += answer.type.name == "ERROR" and "too many wait for a snapshot" in answer.body["text"]
        server.terminate()
        assert server.wait(10) == 0
        assert len(list((tmp_path / "s").glob("generation-*"))) <= 2
        assert server.log().count("after 0.") <= 4


def ready(world, rule=APPLY):
    workers = team(world, 2, [spec(0, 4)], rule=rule)
    if rule is not AVERAGE:
        workers[0].configure(0, 4)
    return workers


def store_slot(world, workers):
    body = {"slot": "momentum_buffer", "steps": [1.0]}
    assert workers[0].ask(MessageType.STORE, key=0, payload=torch.ones(4), body=body).type is MessageType.OK


CHANGES = {
    "PUSH": lambda world, workers: workers[0].push(0, 1, torch.ones(4)),
    "a slot": store_slot,
    "HELLO": lambda world, workers: Worker(world, 7, rule=APPLY).hello(),
    "BYE": lambda world, workers: workers[1].send(MessageType.BYE),
    "a lease that ran out": lambda world, workers: world.advance(6, workers[0]),
    "a lease ended by hand": lambda world, workers: world.shard.evict("demo", 1, world.now_s),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_snapshot_keeps_counts_as_a_change(change):
    world = World()
    workers = ready(world)
    before = world.state_hash()  # captures
    assert world.shard.durable.has_changed()  # captured is not durable
    world.shard.durable.note(1)
    for worker in workers:
        worker.heartbeat()
    Worker(world, role="reader").hello()
    assert (world.shard.durable.has_changed(), world.state_hash()) == (False, before)
    CHANGES[change](world, workers)
    assert world.shard.durable.has_changed()
    assert world.state_hash() != before


def test_a_change_during_the_write_is_one_still():
    world = World()
    workers = ready(world)
    world.shard.durable.capture()
    workers[0].push(0, 1, torch.ones(4))
    world.shard.durable.note(1)
    assert world.shard.durable.has_changed()


def test_a_job_that_ends_is_a_change():
    world = World()
    ready(world, AVERAGE)
    world.advance(6)
    assert len(world.shard.durable.capture()) == 1
    world.shard.durable.note(1)
    assert not world.shard.durable.has_changed()
    world.advance(6)  # nobody is remembered any more, and nothing was said
    assert world.shard.durable.has_changed()
    assert world.shard.durable.capture() == []


def test_a_server_without_jobs_says_so_to_the_next(tmp_path):
    options = {"snapshot_dir": tmp_path / "s", "snapshot_interval_s": 0.0}
    with running_server(**options) as server:
        with Peer(server.addresses[0]) as peer:
            assert peer.hello(rule=AVERAGE).body["state"] == "initialise"
            body = {"kind": "parameter", "segments": [["weight", [4], [1], 0, 4]]}
            assert peer.request("REGISTER", key=0, payload=torch.zeros(4), body=body).type.name == "OK"
            assert peer.request("SEAL", body={"chunks": 1, "fingerprint": 1}).type.name == "OK"
            assert peer.request("SNAPSHOT").body == {"generation": 1}
            assert peer.request("BYE").type.name == "OK"
        server.terminate()
        assert server.wait() == 0
    with running_server(**options) as server:
        assert server.lines[1].endswith("generation 2 (no job)")
        assert server.status()["jobs"] == {}


# ---- the directory of a live server ----------------------------------------------------------------------------------


def test_what_is_gone_is_not_what_a_server_is_durable_to(tmp_path):
    directory = tmp_path / "s"
    with running_server(snapshot_dir=directory, snapshot_interval_s=0.0, shards=2) as server:
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(10))
            assert peer.request("SNAPSHOT").body == {"generation": 1}
            assert peer.request("HEARTBEAT").body["durable_version"] == 0
            shutil.rmtree(directory)
            refused = peer.request("SNAPSHOT")
            assert refused.body["code"] == "snapshot_failed"
            assert "No such file or directory" in refused.body["text"]
            assert "there is no older one" in refused.body["text"]
            assert server.status()["snapshot"]["generation"] is None
            assert [shard["durable_generation"] for shard in server.status()["shards"]] == [None, None]
            assert peer.request("HEARTBEAT").body["durable_version"] is None
            directory.mkdir()
            generation = peer.request("SNAPSHOT").body["generation"]
            assert generations(directory) == [f"generation-{generation:012d}"]
        with (
            pytest.raises(ServerFailedError, match=rf"exit code 4(.|\n)*held by process {server.pid}\)"),
            running_server(snapshot_dir=directory),
        ):
            pass

        def last_told():
            return [event["text"] for event in server.status()["events"] if event["kind"] == "snapshot"][-1]

        eventually(lambda: last_told() == f"generation {generation} is written")
        assert "generation None" not in str(server.status()["events"])
        server.terminate()
        assert server.wait() == 0


def test_two_servers_in_one_place_leave_each_other_s_generations_alone(tmp_path):
    directory = tmp_path / "s"
    options = {"snapshot_dir": directory, "snapshot_interval_s": 0.0}
    with running_server(**options) as first, Peer(first.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        assert peer.request("SNAPSHOT").body == {"generation": 1}
        shutil.rmtree(directory)
        with running_server(**options) as second, Peer(second.addresses[0]) as other:
            other.make_job(torch.zeros(10))
            for generation in (1, 2):
                other.change()
                assert other.request("SNAPSHOT").body == {"generation": generation}
                refused = peer.request("SNAPSHOT")
                assert f"held by process {second.pid})" in refused.body["text"]
                assert first.status()["snapshot"]["generation"] is None
            assert len(generations(directory)) == 2
            second.terminate()
            assert second.wait() == 0
        # Numbers go on above those of the other, which have gone once two of the first's are there.
        for generation in (4, 5):
            peer.change()
            assert peer.request("SNAPSHOT").body == {"generation": generation}
        assert generations(directory) == ["generation-000000000004", "generation-000000000005"]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_that_does_not_fit_the_memory_is_refused(tmp_path):
    directory = tmp_path / "s"
    with running_server(snapshot_dir=directory, snapshot_interval_s=0.0) as server:
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(1000))
        server.terminate()
        assert server.wait() == 0
    words = r"exit code 4(.|\n)*Generation 1 in .*--max-memory-bytes \(expected at most 3999 bytes.*, got 4000\)"
    with pytest.raises(ServerFailedError, match=words), running_server(snapshot_dir=directory, max_memory_bytes=3999):
        pass
    with running_server(snapshot_dir=directory, max_memory_bytes=4000) as server:
        assert server.lines[1].endswith("generation 1 (job version 0)")


def test_backups_beyond_the_memory_do_not_keep_a_server_from_starting_again(tmp_path):
    # Of the 64 bytes values and one slot need 32, CONFIGURE asks for two slots more, and eight backups for nothing.
    world = World(max_memory_bytes=64)
    workers = team(world, 8, [spec(0, 4)], rule=APPLY | {"delay_compensation": 0.04})
    workers[0].configure(0, 4, groups=[SGD | {"momentum": 0.9}])
    for worker in workers:
        worker.pull(0)
    assert world.shard.jobs.memory_bytes() == 160
    with SnapshotStore(tmp_path / "s") as store:
        store.save([world.shard.durable.capture()])
        restore(store, [shard := Shard(0, 8, ShardSettings(max_memory_bytes=64), world.clocks)])
        assert shard.jobs.memory_bytes() == 160
        with pytest.raises(SnapshotError, match=r"expected at most 31 bytes at shard 0, its share, got 32\)"):
            restore(store, [Shard(0, 9, ShardSettings(max_memory_bytes=31), world.clocks)])


# ---- ipc paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a file", "a directory", "a symbolic link"])
def test_a_file_at_an_ipc_path_stays(tmp_path, kind):
    path, target = tmp_path / "path", tmp_path / "target"
    target.write_text("mine")
    if kind == "a file":
        path.write_text("mine")
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to(target)
    before = path.lstat()
    with (
        pytest.raises(ServerFailedError, match=rf"exit code 3(.|\n)*expected nothing at that path.*, got {kind}\)"),
        running_server(bind=f"ipc://{path}"),
    ):
        pass
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert target.read_text() == "mine"


# ---- the service manager ---------------------------------------------------------------------------------------------
