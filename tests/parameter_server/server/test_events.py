"""Events that repeat leave room for others."""

from __future__ import annotations

from psengine.parameter_server.server.events import MAX_EVENTS, SNAPSHOT_FAILED_REPEAT_S, EventLog
from psengine.parameter_server.server.interfaces import Clocks


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
