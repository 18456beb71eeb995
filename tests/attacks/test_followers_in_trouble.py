"""A leader that is stopped past its lease, an etcd that is gone: no acknowledged update is lost, or applied twice."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from attacks.kill_loop import Counters, FailoverTrial, Pairs, role
from support.etcd_server import EtcdServer, etcd_server, needs_etcd
from support.waiting import eventually

pytestmark = needs_etcd
LEASE_S = 3.0
LONG_S = 1.5 * LEASE_S


@contextmanager
def trial_over_etcd() -> Iterator[tuple[FailoverTrial, Pairs, EtcdServer]]:
    """A server with a follower, and three workers of an async job."""
    with etcd_server() as etcd, ExitStack() as context:
        options = {"durability": "replica", "election": f"etcd={etcd.place}", "lease_s": LEASE_S}
        pairs = Pairs(context, lambda number, side: options, 1)
        yield FailoverTrial(context, pairs, random.Random(1), "replica"), pairs, etcd


def test_a_leader_that_was_stopped_past_its_lease_is_fenced_and_follows():
    with trial_over_etcd() as (trial, pairs, _):
        leader = pairs.leader(0)
        former = pairs.members[0][leader]
        former.signal(signal.SIGSTOP)
        trial.await_steps()
        former.signal(signal.SIGCONT)
        eventually(lambda: role(former) == "following", "the former leader follows")
        pairs.await_sync(0)
        trial.account()
        assert trial.counters == Counters(survived=1)
        assert [one.status()["replica"]["term"] for one in pairs.members[0]] == [2, 2]


def outlast_the_lease(pairs: Pairs) -> None:
    """Until all servers that live have asked etcd in vain, and for longer than a lease."""
    for one in filter(lambda one: one.is_alive, pairs.members[0]):
        eventually(lambda one=one: "does not answer" in one.status()["replica"]["why"], "etcd is missed")
    time.sleep(LONG_S)


@pytest.mark.parametrize("has_failed", ["leader", "follower", "nobody"])
def test_without_etcd_nobody_takes_over_or_is_dropped_until_it_is_back(has_failed):
    with trial_over_etcd() as (trial, pairs, etcd):
        leader = pairs.leader(0)
        etcd.end()
        outlast_the_lease(pairs)
        trial.await_steps()
        if has_failed != "nobody":
            side = leader if has_failed == "leader" else 1 - leader
            pairs.members[0][side].kill()
            steps = trial.steps()
            outlast_the_lease(pairs)
            # One step of each worker may have been answered before.
            assert all(now <= step + 1 for now, step in zip(trial.steps(), steps, strict=True))
            pairs.start(0, side)
        etcd.start()
        trial.await_steps()
        pairs.await_sync(0)
        trial.account()
        assert trial.counters == Counters(survived=1)
        assert pairs.leader(0) == (1 - leader if has_failed == "leader" else leader)
