"""Events that repeat leave room for others, and lines in the log are bounded."""

from psengine.parameter_server.server.daemon import MAX_EVENTS, MAX_LINES, EventLog


def test_what_repeats_stays_once_and_is_counted():
    log = EventLog()
    log.note("evicted", "silent for 6.0 s, longer than its lease", job="a", worker=1)
    for generation in range(2, 2 + 3 * MAX_EVENTS):
        log.note("snapshot_failed", f"generation {generation} was not written: disk full")
        log.note("refused", "no", job="a", worker=1)
    log.note("refused", "no", job="a", worker=2)
    log.note("snapshot", "generation 700 is written")
    log.note("snapshot", "generation 701 is written")
    assert [(event.kind, event.worker, event.text) for event in log.events()] == [
        ("evicted", 1, "silent for 6.0 s, longer than its lease"),
        ("snapshot_failed", None, f"generation {3 * MAX_EVENTS + 1} was not written: disk full; 599 like it before"),
        ("refused", 1, "no; 599 like it before"),
        ("refused", 2, "no"),
        ("snapshot", None, "generation 701 is written"),
    ]


def test_the_list_and_the_lines_are_bounded(caplog):
    log = EventLog()
    for rank in range(MAX_EVENTS + 50):
        log.note("evicted", "silent", job="a", worker=rank)
    assert len(log.events()) == MAX_EVENTS
    assert log.events()[-1].worker == MAX_EVENTS + 49
    assert len(caplog.records) == MAX_LINES
    assert caplog.records[0].getMessage() == "job 'a': silent"
