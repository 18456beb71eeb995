"""Several shards' words about a job, as one view."""

from dataclasses import replace

from support.statuses import shard, worker

from psengine.status_port.overview import merge_jobs


def merged(*shards):
    return merge_jobs(shards)["demo"]


def test_counts_are_added_and_extremes_kept():
    counts = {"refused": {"stale": 1, "non_finite": 4}, "staleness": {2: 1, 0: 1}, "max_staleness": 3, "evicted": 1}
    view = merged(
        shard(worker(0), worker(1), refused={"stale": 2}, staleness={0: 3, 12: 1}, max_staleness=12, evicted=1),
        shard(worker(0, pushes=7, refused=2), worker(1), version_min=2, version_max=5, **counts),
    )
    assert (view.kind, view.chunks, view.values_bytes, view.applied) == ("async", 6, 200, 14)
    assert (view.version_min, view.version_max, view.members) == (2, 9, 2)
    assert (view.bytes_in, view.bytes_out, view.evicted) == (20, 40, 1)
    assert view.refused == {"stale": 3, "non_finite": 4}
    assert list(view.staleness.items()) == [(0, 4), (2, 1), (12, 1)]
    assert view.max_staleness == 12
    assert [(w.pushes, w.refused) for w in view.workers] == [(12, 2), (10, 0)]


def test_the_coordinator_says_who_a_worker_is_and_the_shards_whom_it_waits_for():
    view = merged(
        shard(worker(0, state="silent", silent_s=4.0), worker(1, waiting_for=(2,)), worker(2, state="joining")),
        shard(worker(0), worker(1, waiting_for=(0,)), worker(3), index=1),
    )
    assert [w.state for w in view.workers] == ["silent", "live", "joining"]
    assert view.workers[0].silent_s == 4.0
    assert view.workers[1].waiting_for == (0, 2)
    assert [w.awaited_by for w in view.workers] == [1, 0, 1]


def test_staleness_percentiles_are_those_of_all_shards_together():
    view = merged(shard(worker(0, staleness={0: 98}), worker(1)), shard(worker(0, staleness={10: 1, 9: 1}), index=1))
    assert (view.workers[0].staleness_p50, view.workers[0].staleness_p99) == (0, 9)
    assert view.workers[1].staleness_p50 is None


def test_a_job_whose_coordinator_was_not_asked_and_one_that_has_no_chunks_yet():
    view = merged(shard(worker(0), index=1))
    assert (view.members, view.workers[0].state, view.workers[0].host) == (1, "live", "")
    led = replace(shard(worker(0)), jobs={})
    view = merged(led)
    assert (view.members, view.chunks, view.workers[0].host) == (1, 0, "host0")
