"""What becomes of jobs that nobody works on any more: their place, their memory, their snapshot, their events."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch
from support.server_process import Peer, running_server
from support.shard_world import APPLY, ErrorCode, Worker, World, codes, spec, team, world_of
from support.waiting import eventually

from psengine.errors import ProtocolError
from psengine.parameter_server.server.admin import Orders
from psengine.parameter_server.server.events import MAX_EVENTS, SNAPSHOT_FAILED_REPEAT_S, EventLog
from psengine.parameter_server.server.interfaces import Clocks
from psengine.parameter_server.server.core.shard_jobs import MAX_JOBS
from psengine.protocol.messages import MessageType

LEASE_S = 5.0


def finished(world, job, *, numel=16, rule=None):
    """A job whose only worker has said goodbye."""
    more = {} if rule is None else {"rule": rule}
    worker = Worker(world, 0, job=job, **more)
    assert worker.hello() == "initialise"
    answer = worker.register(spec(0, numel))
    if answer.type is not MessageType.OK:
        return codes([answer])
    worker.seal([spec(0, numel)])
    worker.push(0, 1, torch.ones(numel))
    worker.send(MessageType.BYE)
    return []


# ---- memory of jobs that are over ------------------------------------------------------------------------------


def test_jobs_that_average_one_after_another_need_no_more_memory_than_one():
    world = World(max_memory_bytes=200)
    for number in range(10):
        assert finished(world, f"job{number}") == []


def test_values_of_others_are_not_given_up_for_memory():
    world = World(max_memory_bytes=200, lease_s=LEASE_S)
    (living,) = team(world, 1, [spec(0, 16)], job="living")
    living.push(0, 1, torch.ones(16))
    assert finished(world, "applied", rule=APPLY) == []
    newcomer = Worker(world, 0, job="new")
    newcomer.hello()
    # A lease after its worker went silent the averaging job is over; the other one's values are somebody's still.
    assert codes([newcomer.register(spec(0, 32))]) == [ErrorCode.MEMORY]
    world.advance(LEASE_S + 0.5, newcomer)
    assert codes([newcomer.register(spec(0, 32))]) == [ErrorCode.MEMORY]
    world.advance(LEASE_S + 0.5, newcomer)
    assert newcomer.register(spec(0, 32)).type is MessageType.OK
    assert set(world.shard.status(world.now_s).jobs) == {"applied", "new"}


# ---- jobs that are forgotten by hand ---------------------------------------------------------------------------


def test_one_job_too_many_is_told_how_to_make_room():
    world = World(codec=False)
    for number in range(MAX_JOBS):
        finished(world, f"job{number}", numel=1, rule=APPLY)
    late = Worker(world, 0, job="late", rule=APPLY)
    assert late.hello() == ErrorCode.MEMORY
    (refused,) = late.take()
    assert f"expected at most {MAX_JOBS}, got one more, 'late'" in refused.body["text"]
    assert "psengine admin forget --job NAME" in refused.body["text"]
    world.shard.forget("job7")
    assert late.hello() == "initialise"


def test_of_a_forgotten_job_nothing_is_left():
    world, (worker,) = world_of(1, [spec(0, 4)], rule=APPLY)
    worker.push(0, 1, torch.ones(4))
    world.shard.durable.capture()
    world.shard.durable.note(3)
    assert (world.shard.worker_count("demo"), world.shard.worker_count("other")) == (1, None)
    worker.send(MessageType.BYE)
    assert world.shard.worker_count("demo") == 0
    world.shard.forget("demo")
    world.shard.forget("demo")
    assert world.shard.worker_count("demo") is None
    assert world.shard.durable.has_changed()
    assert (world.shard.durable.capture(), world.shard.jobs.memory_bytes()) == ([], 0)
    successor = Worker(world, 0, rule=APPLY)
    assert successor.hello() == "initialise"
    (welcome,) = successor.take()
    assert welcome.body["durable_version"] is None


def busy(job):
    raise FutureTimeoutError


@pytest.mark.parametrize(
    ("forget", "text"),
    [
        (lambda job: 2, r"'a b' is in use \(expected no workers, got 2\)"),
        (lambda job: None, "there is no job 'a b'"),
        (busy, "ask again"),
    ],
)
def test_a_job_that_is_not_forgotten_says_why(forget, text):
    orders = Orders(snapshot=None, evict=lambda *_: False, forget=forget, drain=lambda: 0)
    with pytest.raises(ProtocolError, match=text):
        orders.perform({"action": "forget", "job": "a b"})


def order(peer, **body):
    """The answer's type and what it says."""
    answer = peer.request("ADMIN", body=body)
    return answer.type.name, answer.body["text"]


def test_a_forgotten_job_is_gone_from_every_shard_and_does_not_come_back(tmp_path):
    options = {"shards": 2, "snapshot_dir": tmp_path / "s", "snapshot_interval_s": 0.0}
    with running_server(**options) as server:
        peers = [Peer(address) for address in server.addresses]
        for peer in peers:
            peer.make_job(torch.zeros(10))
        assert order(peers[0], action="snapshot")[0] == "OK"
        kind, text = order(peers[1], action="forget", job="job")
        assert (kind, "expected no workers, got 1" in text) == ("ERROR", True)
        for peer in peers:
            assert peer.request("BYE").type.name == "OK"
        assert order(peers[0], action="forget", job="other")[0] == "ERROR"
        assert len(server.job("job")) == 2
        assert order(peers[1], action="forget", job="job")[0] == "OK"
        assert server.status()["jobs"] == {}
        eventually(lambda: server.status()["snapshot"]["generation"] == 2)
        server.kill()
        for peer in peers:
            peer.__exit__()
    with running_server(**options) as server:
        assert server.status()["jobs"] == {}


# ---- what people are told --------------------------------------------------------------------------------------


def test_a_disk_that_is_full_for_days_leaves_room_for_other_events():
    now_s = [0.0]
    log = EventLog(Clocks(wall_s=lambda: now_s[0], measure_s=lambda: now_s[0]))
    log.note("evicted", "silent for 6.0 s, longer than its lease", job="a", worker=1)
    for generation in range(2, 2 + 3 * MAX_EVENTS):
        now_s[0] += 60.0
        log.note("snapshot_failed", f"a snapshot was not written: generation-{generation:08d}: disk full")
        log.note("snapshot_failed", "a snapshot was not written: no answer")
    events = log.events()
    assert events[0].kind == "evicted"
    full = [event.text for event in events if "disk full" in event.text]
    assert len(full) == 3 * MAX_EVENTS * 60 / SNAPSHOT_FAILED_REPEAT_S
    assert full[0].endswith("generation-00000002: disk full")
    assert full[1].endswith("generation-00000062: disk full; 59 like it before")
