"""A server and its follower, in real processes: what workers get once the leader has died, and who may follow."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support.server_process import Peer, ServerProcess, running_server
from support.shard_world import APPLY, AVERAGE, MERGE, spec, table
from support.waiting import eventually
from support.worker_sessions import crew

from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.parameter_server.server.durability.inspection import back_up, inspect
from psengine.parameter_server.server.log.records import RecordKind
from psengine.parameter_server.server.transport.authentication import keygen
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.protocol.frames import TYPE_AT
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.messages import NOBODY, ErrorCode, MessageType
from psengine.protocol.rows import pack_rows, unpack_rows
from psengine.version import __version__

LEASE_S = 10.0
STEPS, KILLED_AT = 8, 4
SIZES = (30_000, 50)


def settings_of(directory, name: str, tier: str, **options: Any) -> dict[str, Any]:
    kept = {"snapshot_dir": directory / name} if "log" in tier else {}
    election = f"launcher={directory}/elector"
    return {"durability": tier, "election": election, "lease_s": LEASE_S, "shards": 2, **kept, **options}


def is_in_sync(server: ServerProcess) -> bool:
    return bool(server.status()["replica"]["is_in_sync"])


def leads(server: ServerProcess) -> bool:
    return server.status()["replica"]["role"] == "leading"


@contextmanager
def pair(directory, tier: str = "replica", **options: Any) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A leader, and its follower in sync."""
    with running_server(**settings_of(directory, "first", tier, **options)) as leader:
        follows = settings_of(directory, "second", tier, follow=leader.addresses[0], **options)
        with running_server(**follows) as follower:
            eventually(lambda: is_in_sync(leader), "a follower in sync")
            yield leader, follower


def train(address: str, rule: dict[str, Any], disturb: Callable[[], object]) -> list[torch.Tensor]:
    """All answers of some steps of two workers, and what the servers hold then; ``disturb`` comes amid a step."""
    specs, found = [spec(key, size) for key, size in enumerate(SIZES)], []
    if rule is not AVERAGE:
        specs.append(table(2, dim=4))
    parameters = {f"p{key}": torch.zeros(1) for key in range(2)}
    optimizer = torch.optim.Adam(parameters.values(), lr=0.1)
    with crew(address, 2, specs, rule=rule) as workers:
        for worker in workers if rule is not AVERAGE else ():
            worker.attach_optimizer(specs[:2], optimizer, parameters)
        for step in range(1, STEPS + 1):
            pushes = []
            for rank, worker in enumerate(workers):
                generator = torch.Generator().manual_seed(10 * step + rank)
                for key, size in enumerate(SIZES):
                    found.append(torch.empty(size))
                    pushes.append(worker.push(key, torch.randn(size, generator=generator), [found[-1]]))
                if rule is not AVERAGE:
                    rows = pack_rows(torch.tensor([3, 10 * step + rank]), torch.randn(2, 4, generator=generator))
                    pushes.append(worker.push(2, rows, (), rows=2, lr=0.1, divisor=2))
                if step == KILLED_AT and rank == 1:
                    disturb()
                if rule is APPLY:  # else the order of two workers would be chance
                    wait_all(pushes)
            wait_all(pushes)
        if rule is not AVERAGE:
            slots = [torch.empty(size) for size in SIZES]
            wait_all([workers[0].pull(key, [slot], slot="exp_avg_sq") for key, slot in enumerate(slots)])
            ids, rows = unpack_rows(workers[0].pull(2, scan=0, most=100).wait(), 4)
            found += [*slots, *(one[ids.argsort()] for one in (ids, rows))]
    return found


def step_by_sgd(worker: WorkerSession) -> None:
    optimizer = torch.optim.SGD([parameter := torch.zeros(1)], lr=1.0)
    worker.attach_optimizer([spec(0, 1000)], optimizer, {"p0": parameter})


@pytest.mark.parametrize(
    ("rule", "tier"), [(APPLY, "replica"), (APPLY, "log+replica"), (MERGE, "replica"), (AVERAGE, "replica")]
)
def test_after_a_takeover_all_bits_are_those_of_the_undisturbed_run(tmp_path, rule, tier):
    with running_server(shards=2) as alone:
        expected = train(alone.addresses[0], rule, int)
    with pair(tmp_path, tier) as (leader, follower):
        address = f"{leader.addresses[0]}|{follower.addresses[0]}"
        found = train(address, rule, leader.kill)
        assert leads(follower)
        assert follower.status()["replica"]["term"] == 2
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_who_may_follow(tmp_path):
    """Leader and follower have the same keys; a client's are not enough."""
    (tmp_path / "server").mkdir()
    server_key, server_public = keygen(tmp_path / "server", "server")
    client_key, _ = keygen(tmp_path / "clients", "worker")
    client, own = (CurveClientKeys.load(one, server_public) for one in (client_key, server_key))
    body = {"software": __version__, "shards": 2, "index": 0, "addresses": ["tcp://b:1", "tcp://b:2"]}
    body |= {"durability": "replica", "max_memory_bytes": 2**30, "keep_history": False, "plugins": ["json"]}
    keys = {"curve_key": server_key, "allow": tmp_path / "clients"}
    with pair(tmp_path, max_memory_bytes=2**30, plugins="json", **keys) as (leader, follower):
        for keys, address, fields, code, words in (
            (client, leader, {}, ErrorCode.NOT_ALLOWED, "only this server's user"),
            (own, leader, {"software": "0"}, ErrorCode.RULE_MISMATCH, rf"expected software {__version__}, got 0"),
            (own, leader, {"index": 1}, ErrorCode.RULE_MISMATCH, "expected index 0, got 1"),
            (
                own,
                leader,
                {"durability": "log+replica"},
                ErrorCode.RULE_MISMATCH,
                "replica, got log.replica",
            ),
            (own, leader, {"max_memory_bytes": 1}, ErrorCode.RULE_MISMATCH, f"max_memory_bytes {2**30}, got 1"),
            (own, leader, {"keep_history": True}, ErrorCode.RULE_MISMATCH, "keep_history False, got True"),
            (own, leader, {"plugins": []}, ErrorCode.RULE_MISMATCH, r"plugins \['json'\], got \[\]"),
            (own, leader, {}, ErrorCode.NOT_READY, f"has a follower: {follower.addresses[0]}"),
            (own, follower, {}, ErrorCode.NOT_LEADING, f"the server at {leader.addresses[0]}"),
        ):
            with Peer(address.addresses[0], curve=keys) as peer:
                peer.epoch = 2**63
                refused = peer.request("FOLLOW", worker=NOBODY, body=body | fields)
                assert refused.body["code"] == code
                assert re.search(words, refused.body["text"]), refused.body
        with Peer(leader.addresses[0], curve=own) as peer:
            peer.epoch = 1
            assert peer.request("FOLLOW", body=body).body["code"] == ErrorCode.STALE
        leader.kill()
        eventually(lambda: leads(follower), "a takeover")


def test_a_follower_with_another_memory_limit_is_refused_and_its_leader_goes_on(tmp_path):
    leading, following = (settings_of(tmp_path, "", "replica", max_memory_bytes=size << 20) for size in (80, 40))
    with running_server(**leading) as leader:
        eventually(lambda: leads(leader), "the first leads")
        with (
            running_server(**following, follow=leader.addresses[0]) as follower,
            crew(leader.addresses[0], 1, [spec(0, 1000)], rule=APPLY) as (worker,),
        ):
            words = f"expected max_memory_bytes {80 << 20}, got {40 << 20}"
            eventually(lambda: words in follower.status()["replica"]["why"], "the follower says why")
            step_by_sgd(worker)
            worker.push(0, torch.ones(1000), []).wait()
            assert not is_in_sync(leader)


def hold_records(directory) -> None:
    """In a follower: apply nothing of what a worker pushes until a file is there."""
    real = ShardThread.take_records

    def wait(self: ShardThread, records: Any) -> None:
        if any(one.kind is RecordKind.MESSAGE and one.frames[0][TYPE_AT] == MessageType.PUSH for one in records):
            (directory / "holds").touch()
            eventually((directory / "goes on").exists, "it may go on")
        real(self, records)

    ShardThread.take_records = wait  # type: ignore[method-assign]


def test_what_a_follower_has_not_applied_is_not_acknowledged(tmp_path):
    with running_server(**settings_of(tmp_path, "first", "log+replica", shards=1)) as leader:
        follows = settings_of(tmp_path, "second", "log+replica", follow=leader.addresses[0], shards=1)
        with (
            running_server(**follows, sabotage=partial(hold_records, tmp_path)) as follower,
            crew(f"{leader.addresses[0]}|{follower.addresses[0]}", 1, [spec(0, 1000)], rule=APPLY) as (worker,),
        ):
            eventually(lambda: is_in_sync(leader), "a follower in sync")
            step_by_sgd(worker)
            push = worker.push(0, torch.ones(1000), values := [torch.empty(1000)])
            worker.end_step()
            eventually((tmp_path / "holds").exists, "the follower has the record")
            assert leader.status()["replica"]["lag_records"]
            assert not push.is_done
            (tmp_path / "goes on").touch()
            push.wait()
            leader.kill()
            worker.push(0, torch.ones(1000), values).wait()
            assert torch.equal(values[0], torch.full((1000,), -2.0))


@pytest.mark.parametrize("asked", ["replica", "log+replica"])
def test_a_server_starts_from_its_own_log_whatever_tier_its_job_asked_for(tmp_path, asked):
    settings = settings_of(tmp_path, "first", "log+replica", shards=1, snapshot_interval_s=0.0)
    with running_server(**settings) as server:
        with crew(server.addresses[0], 1, [spec(0, 1000)], rule={**APPLY, "durability": asked}) as (worker,):
            step_by_sgd(worker)
            for _ in range(3):
                worker.push(0, torch.ones(1000), []).wait()
        server.kill()
    assert any("job version 3" in line for line in inspect(tmp_path / "first"))
    assert any("job version 3" in line for line in back_up(tmp_path / "first", tmp_path / "copy"))
    with running_server(**settings) as again:
        eventually(lambda: [one["version_max"] for one in again.job("job")] == [3], "it leads again")


def test_servers_of_one_host_and_one_secret_find_each_other(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a-long-enough-random-word\n")
    secret.chmod(0o600)
    with pair(tmp_path, secret_file=secret, bind="tcp://0.0.0.0:0") as (leader, follower):
        leader.kill()
        eventually(lambda: leads(follower), "a takeover")


def test_where_the_elector_s_record_is_lost_only_a_server_without_an_elector_begins(tmp_path):
    """Its operator starts it on the follower's directory; then it leads a pair again."""
    with pair(tmp_path, "log+replica", shards=1) as (leader, follower), ExitStack() as stack:
        (worker,) = stack.enter_context(crew(leader.addresses[0], 1, [spec(0, 1000)], rule=APPLY))
        step_by_sgd(worker)
        for _ in range(3):
            worker.push(0, torch.ones(1000), []).wait()
        (tmp_path / "elector").unlink()
        leader.kill()
        eventually(lambda: "record is gone" in follower.status()["replica"]["why"], "the loss is seen")
        assert not leads(follower)
        follower.kill()
    settings = settings_of(tmp_path, "second", "log+replica", shards=1)
    for name in ("first", "second"):
        with running_server(**{**settings, "snapshot_dir": tmp_path / name}) as server:
            eventually(lambda: "has no record" in server.status()["replica"]["why"], "it waits")
            assert not leads(server)
            assert not (tmp_path / "elector").exists()
    with running_server(durability="log", snapshot_dir=tmp_path / "second") as server:
        assert server.job("job")[0]["version_max"] == 3
    with running_server(**settings) as server:
        eventually(lambda: leads(server), "it leads a pair again")
