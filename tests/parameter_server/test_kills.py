"""Servers that are killed by real signals while others train, and one that is started again with an older state."""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from attacks.kill_loop import Servers
from support.fault_workers import Reports, expect_workers, results_of, worker_processes
from support.marks import slow
from support.server_process import Peer, running_server
from support.server_training import assert_equal, batches, state_of, train, wrap
from support.shard_world import APPLY, SGD, spec
from support.waiting import eventually
from support.worker_sessions import entered

import psengine
from psengine.errors import ServerRefusedError

STEPS, HELD_AT = 36, 28


def train_held(reports: Reports, address: str, uses_views: bool) -> dict[str, torch.Tensor]:
    """Train, and wait at a step until the test says go; the model's state and the momenta."""
    rank = int(os.environ["PSENGINE_WORKER"])
    expect_workers(3)
    strategy = psengine.SyncServer(servers=address, timeout_s=40.0)
    wrapped = wrap(strategy, rank, bucket_cap_mb=0.00001, gradient_as_bucket_view=uses_views)
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), wrapped)
    for step, batch in enumerate(batches(rank, STEPS), 1):
        reports.say("step", step)
        if step == HELD_AT:
            reports.await_go()
        train(wrapped, optimizer, [batch])
    states = optimizer.state_dict()["state"]
    momenta = {f"momentum {number}": state["momentum_buffer"] for number, state in states.items()}
    result = state_of(wrapped.module) | momenta
    strategy.close()
    return result


@pytest.mark.parametrize("tier", ["memory", slow("snapshot"), "log"])
def test_sync_server_equals_the_undisturbed_run_where_servers_are_killed(tmp_path, tier):
    chooser = random.Random(tier)
    found = []
    for kills in ((), (0, 1, 0)):
        with ExitStack() as context:
            kept = {"snapshot_interval_s": 0.3, "durability": tier, "lease_s": 30.0}
            directories = [tmp_path / f"{len(kills)}-kills-{number}" for number in range(2)]
            options = [{"lease_s": 30.0} if tier == "memory" else kept | {"snapshot_dir": one} for one in directories]
            servers = Servers(context, options.__getitem__)
            workers = context.enter_context(worker_processes())
            arguments = (train_held, ",".join(servers.addresses), tier != "memory")
            members = [workers.start(*arguments, rank=rank) for rank in range(3)]
            for number, index in enumerate(kills):
                members[number].wait_for("step", at_least=8 * (number + 1))
                time.sleep(chooser.random() * 0.02)
                servers.kill(index)
            for member in members:
                member.go()
            found += results_of(members)
    for one in found[1:]:
        assert_equal(found[0], one)


TIERS = ({"durability": "log"}, {"durability": "log+replica", "election": "launcher={}/elector"})


@pytest.mark.parametrize("tier", TIERS)
def test_a_server_with_an_older_state_than_was_acknowledged_serves_nobody(tmp_path: Path, tier: dict[str, str]):
    """It was started again with a copy from before: its workers know better."""
    options = {name: value.format(tmp_path) for name, value in tier.items()}
    options |= {"bind": f"ipc://{tmp_path}/socket", "lease_s": 10.0}
    with ExitStack() as context:
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "kept", **options))
        session = entered(server.addresses[0], 0, [spec(0)], rule=APPLY)
        context.callback(session.close)
        session.configure(0, {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, 4, 0]]}).wait()
        for number in range(4):
            session.push(0, torch.ones(4), []).wait()
            if number == 1:
                shutil.copytree(tmp_path / "kept", tmp_path / "old")
        server.kill()
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "old", **options))
        refusal = r"older state, version 2, and workers knew of version 4[\s\S]*--snapshot-dir of before"
        with pytest.raises(ServerRefusedError, match=refusal) as caught:
            session.push(0, torch.ones(4), []).wait()
        assert caught.value.code == "state_lost"
        with Peer(server.addresses[0]) as peer:
            assert peer.hello().body["code"] == "state_lost"
        server.kill()
        server = context.enter_context(running_server(snapshot_dir=tmp_path / "kept", **options))
        eventually(lambda: server.job("job"), "it leads")
        with Peer(server.addresses[0]) as peer:
            assert peer.hello(rank=1, world_size=2).type.name == "WELCOME"
            assert server.job("job")[0]["version_min"] == 4
