"""Rings of samples against what a list of all samples would say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.statuses import server, shard, worker

from psengine.parameter_server.server.status.history import LENGTHS, History, Track
from psengine.parameter_server.status_model import MuteShard, WorkerTimes


def status_of(*, bytes_in=0, bytes_out=0, workers=(), job="job", has_error=False, **counters):
    """One shard that moved so many bytes, and a job of (rank, step, loss)."""
    described = [worker(rank, clock=step, telemetry=WorkerTimes(steps=1, loss=loss)) for rank, step, loss in workers]
    moved = {"bytes_in": bytes_in, "bytes_out": bytes_out}
    status = server(shard(*described, name=job, **{"applied": 0} | moved | counters))
    return replace(status, shards=(MuteShard(index=0, error="no answer"),)) if has_error else status


def shown(track, *arguments, **options):
    return json.loads(track.to_text(*arguments, **options))


def test_rates_are_differences_and_means_of_the_interval():
    track = Track(1, 10)
    track.record(status_of(bytes_in=1000, applied=5, staleness={"0": 5}, workers=[(0, 5, 2.5)]), 100.0, 1.0)
    track.record(
        status_of(
            bytes_in=4000,
            bytes_out=60,
            applied=15,
            refused={"non_finite": 4, "abstained": 9},
            staleness={"0": 7, "64": 8},
            staleness_sum=1000,
            workers=[(0, 11, 2.25), (1, 3, None)],
        ),
        102.0,
        3.0,
    )
    found = shown(track)
    assert found["interval_s"] == 1
    assert found["unix_s"] == [1.0, 3.0]
    assert found["shards"] == [{"index": 0, "bytes_in_per_s": [None, 1500], "bytes_out_per_s": [None, 30]}]
    job = found["jobs"]["job"]
    assert job["applied_per_s"] == [None, 5]
    assert job["refused_per_s"] == [None, 2]
    assert job["staleness_mean"] == [None, 100]  # two of 0, and eight of 64 or more
    assert job["workers"] == {
        "0": {"step": [5, 11], "loss": [2.5, 2.25], "steps_per_s": [None, 3]},
        "1": {"step": [None, 3], "loss": [None, None], "steps_per_s": [None, None]},
    }


def test_memory_is_bounded_whoever_comes():
    track = Track(1, 5, max_rows=5)
    for number, here in enumerate([range(10), range(10), (0,), (1, 5, 6, 7)]):
        track.record(status_of(workers=[(rank, 1, 1.0) for rank in here]), number, number)
        # Beside the shard and the job there is room for three: for those who were first, then for who came back.
        assert set(shown(track)["jobs"]["job"]["workers"]) == ({"0", "1", "2"} if number < 3 else {"0", "1", "5"})


def test_a_sample_is_taken_once_an_interval():
    history = History(lambda: status_of(applied=1))
    for now_s in (100.0, 100.9, 101.05, 159.9, 160.0, 185.5):
        history.sample(now_s, 1000.0 + now_s)
    assert shown(history, 1)["unix_s"] == [1100.0, 1101.05, 1159.9, 1160.0, 1185.5]
    assert shown(history, 60)["unix_s"] == [1100.0, 1159.9, 1185.5]
    assert shown(history, 1, since_unix_s=1159.9)["unix_s"] == [1160.0, 1185.5]
    assert set(LENGTHS) == {1, 60}
    with pytest.raises(KeyError):
        shown(history, 7)
