"""Moments that matter, each under several seeds: what must hold there is what the oracles of every seed check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.scenario import Fault, Scenario
from simulation.world import run

SEEDS = 4
AVERAGE = Scenario(seed=0, rule="average", workers=3, servers=2, shards=2, chunks=5, lease_s=1.0)
APPLY = Scenario(seed=0, rule="apply", workers=3, servers=2, shards=2, chunks=5, lease_s=1.0)
LOG = replace(APPLY, snapshot_s=0.5, keeps_log=True)
BOUND = replace(LOG, max_staleness=0)
MERGE = replace(LOG, rule="merge", quorum=2, grace=0.25)
REPLICA = replace(APPLY, servers=1, has_followers=True, election="etcd", elector_s=0.1)


def _with(scenario: Scenario, *faults: Fault, **changes: object) -> Scenario:
    return replace(scenario, faults=faults, **changes)  # type: ignore[arg-type]


BEHAVIOURS = {
    # ---- beginning
    "the worker that registers the model dies between two servers": _with(
        AVERAGE, Fault("kill worker", 0.0, 0.5, 0, on="REGISTER")
    ),
    "who registered the model dies, and a server, before the other worker has read the layout": _with(
        replace(AVERAGE, workers=2),
        Fault("kill worker", 0.0, 4.0, 0, on="LIST"),
        Fault("kill server", 0.0, 0.5, server=1, on="LIST"),
    ),
    "the lead dies as the model is registered": _with(LOG, Fault("kill lead", 0.0, 0.5, on="COMMIT")),
    "the lead dies as it publishes the first view": _with(AVERAGE, Fault("kill lead", 0.0, 0.5, on="VIEW")),
    "the lead dies as models are compared, and who has the values comes back last": _with(
        replace(AVERAGE, workers=1, shards=1, chunks=2, lease_s=2.0),
        Fault("kill lead", 0.0, 0.4, on="LIST"),
        Fault("stop worker", 0.0, 1.2, 0, on="LIST"),
        joins_s=(0.3,),
        latency_s=(0.02, 0.15),
    ),
    "an old process of worker 0 goes on after its successor has registered": _with(
        APPLY, Fault("zombie", 0.0, 2.0, 0, detail=0.5, on="REGISTER")
    ),
    "who registers is cut off while another one is told to, and dies, and then registers after all": _with(
        replace(AVERAGE, workers=2, shards=1, chunks=2, latency_s=(0.02, 0.15)),
        Fault("cut off", 0.6, 4.0, 0, 1, 0.5, on="ECHOED"),
        Fault("kill worker", 1.0, 4.0, 1, on="REGISTER"),
    ),
    "a server without chunks restarts": _with(AVERAGE, Fault("kill server", 1.0, 0.5, server=1), chunks=1),
    # ---- a step
    "a server dies while a step is half answered": _with(
        AVERAGE, Fault("kill server", 1.0, 0.5, server=1, on="UPDATED")
    ),
    "the lead dies while a step is half answered": _with(AVERAGE, Fault("kill lead", 1.0, 0.5, on="UPDATED")),
    "both servers die": _with(
        LOG, Fault("kill lead", 1.0, 0.5, on="PUSH"), Fault("kill server", 1.1, 0.5, server=1, detail=0.2)
    ),
    "a worker dies in the middle of its pushes": _with(AVERAGE, Fault("kill worker", 1.0, 1.5, 1, on="PUSH")),
    "the lead dies as it decides a merge": _with(MERGE, Fault("kill lead", 1.0, 0.5, on="RELEASE")),
    "a bound waits for a worker that dies": _with(BOUND, Fault("kill worker", 1.0, 4.0, 1)),
    # ---- silence
    "a worker goes on after its lease": _with(AVERAGE, Fault("stop worker", 1.0, 2.5, 1)),
    "an update is open while its worker is out": _with(BOUND, Fault("stop worker", 1.0, 2.5, 1, on="PUSH")),
    "everybody is cut off for two leases": _with(replace(AVERAGE, steps=12), Fault("cut all", 0.5, 2.0, detail=0.3)),
    "the lead stands still": _with(AVERAGE, Fault("stop server", 1.0, 5.0)),
    "a worker cannot reach a server": _with(AVERAGE, Fault("cut", 1.0, 4.0, 1, 1, 0.5)),
    "two workers cannot reach a server each": _with(
        AVERAGE, Fault("cut", 1.0, 5.0, 1, 0, 0.5), Fault("cut", 1.0, 5.0, 2, 1, 0.5)
    ),
    # ---- coming and going
    "the donor dies": _with(AVERAGE, Fault("kill worker", 1.0, 1.0, 0, on="STORE"), joins_s=(1.0,)),
    "the lead dies while a view is prepared": _with(
        AVERAGE, Fault("kill lead", 1.0, 0.5, on="PREPARE"), joins_s=(1.0,)
    ),
    "a worker leaves, and a server dies": _with(
        AVERAGE, Fault("kill server", 0.5, 0.5, server=1, on="LEAVE"), leaves=((1, 3),)
    ),
    "the last step's average is lost": _with(AVERAGE, Fault("kill server", 2.0, 0.5, server=1, on="LEAVE")),
    # ---- followers
    "a leader dies as it answers": _with(REPLICA, Fault("kill leader", 1.0, 1.0, on="UPDATED")),
    "a leader that averages dies in a step": _with(
        replace(REPLICA, rule="average"), Fault("kill leader", 1.0, 0.5, on="PUSH")
    ),
    "a follower dies while it copies": _with(REPLICA, Fault("kill follower", 0.0, 0.5, on="RECORD")),
    "both die in turn": _with(REPLICA, Fault("kill both", 1.0, 1.0, detail=0.9)),
    "a leader goes on after its lease": _with(REPLICA, Fault("stop leader", 1.0, 4.0, on="UPDATED")),
    "a follower does not hear its leader, and is heard": _with(REPLICA, Fault("cut servers", 1.0, 5.0, detail=0.3)),
    "the leader dies while the elector is late": _with(
        REPLICA, Fault("elector late", 0.8, 4.0, detail=0.9), Fault("kill leader", 1.0, 1.0)
    ),
    "the launcher's leader stands still": _with(
        replace(REPLICA, election="launcher", snapshot_s=0.5, keeps_log=True), Fault("stop leader", 1.0, 6.0)
    ),
    # ---- disks
    "a disk is full": _with(LOG, Fault("disk full", 0.5, 4.0, server=1), Fault("kill server", 3.0, 0.5, server=1)),
    "an fsync fails": _with(LOG, Fault("fsync fails", 1.0, 1.0)),
}


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_every_promise_is_kept(name):
    for seed in range(SEEDS):
        assert run(replace(BEHAVIOURS[name], seed=seed)).violation == "", f"seed {seed}"
