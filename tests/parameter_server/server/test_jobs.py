"""What people are told of jobs: why one is not forgotten, and events that repeat."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from psengine.errors import ProtocolError
from psengine.parameter_server.server.admin import Orders
from psengine.parameter_server.server.events import MAX_EVENTS, SNAPSHOT_FAILED_REPEAT_S, EventLog
from psengine.parameter_server.server.interfaces import Clocks


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
