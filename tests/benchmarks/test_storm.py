"""What the storm counts, and when its faults come."""

from storm.account import FaultRecord, Training, percentile
from storm.faults import LEAVING, SHARES, plan


def trained(*processes: tuple[str, list[list[object]]]) -> Training:
    found = Training()
    for host, events in processes:
        found.take(host, events)
    return found


def test_a_batch_that_two_workers_computed_counts_once_and_another_split_does_not():
    steps = [[0.0, "begin"], [1.0, "batch", 1, [0, 1]], [2.0, "batch", 1, [2, 3]], [2.5, "step", 1]]
    again = [[2.0, "begin"], [3.0, "batch", 1, [2, 3]], [4.0, "step", 1], [5.0, "end", "abc"]]
    found = trained(("node-0", steps), ("node-1", again))
    assert found.samples_once(4, 1) == 4
    assert (found.steps, found.weights) == ({1: 2.5}, {"abc"})
    other = trained(("node-0", steps), ("node-1", [[3.0, "batch", 1, [3]]]))
    assert other.samples_once(4, 1) == 3
    assert other.samples_once(5, 1) == 3


def test_epochs_are_counted_apart():
    events = [[float(step), "batch", step, [2 * (step % 2), 2 * (step % 2) + 1]] for step in range(1, 5)]
    assert trained(("node-0", events)).samples_once(4, 2) == 8


def test_a_stall_is_the_longest_gap_until_the_next_fault_beyond_the_usual():
    ends = [1.0, 2.0, 3.0, 4.0, *(8.5 + second for second in range(18)), 60.0]
    steps = [[0.0, "begin"], [0.5, "batch", 1, []], *([at_s, "step", step] for step, at_s in enumerate(ends, 1))]
    found = trained(("node-0", steps), ("node-1", [[30.0, "begin"]]))

    def stalls(*faults: tuple[float, str, str, float]) -> dict[str, list[float]]:
        """Of those that are not empty."""
        return {kind: some for kind, some in found.stalls([FaultRecord(*fault) for fault in faults]).items() if some}

    kill = (4.2, "worker killed", "node-0", 4.2)
    assert stalls(kill) == {"a kill": [3.5]}
    assert stalls((9.0, "host left", "node-0", 9.0), (15.0, "launcher killed", "node-0", 15.0)) == {"a kill": [0.0]}
    assert stalls(kill, (5.0, "link cut", "node-1", 7.0)) == {"silence": [3.5]}
    assert stalls((1.0, "coordinator killed", "node-1", 1.0), kill) == {"coordinator dead too": [3.5]}
    assert stalls((31.0, "worker killed", "node-1", 31.0)) == {}, "it was no member"
    assert found.seconds == 59.0


def test_who_comes_next_after_a_kill():
    first, second = ([[0.0, "begin"], [1.0, "batch", 1, []]], [[6.0, "begin"], [9.0, "batch", 4, []]])
    spare = [[2.0, "begin"], [3.0, "ready"], [5.5, "batch", 2, []]]
    found = trained(("node-0", first), ("node-0", second), ("node-1", spare))
    assert found.next_contributions([FaultRecord(5.0, "worker killed", "node-0", 5.0)]) == ([0.5], [4.0])
    assert found.next_contributions([FaultRecord(9.5, "worker killed", "node-0", 9.5)]) == ([], [])
    assert percentile([1.0, 3.0, 2.0], 0.99) == 3.0


def test_faults_come_from_a_seed_as_often_as_asked():
    options = {"per_hour": 600, "lease_s": 2.0, "hosts": 8, "most_s": 3600.0, "causes": list(SHARES)}
    faults = plan(3, **options)
    assert faults == plan(3, **options) != plan(4, **options)
    assert 500 < len(faults) < 700
    assert {fault.cause for fault in faults} == set(SHARES)
    assert {host for fault in faults for host in fault.hosts} == set(range(8))
    assert {len(fault.hosts) for fault in faults if fault.cause == "host left"} == set(LEAVING)
    assert all(0.4 <= fault.lasts_s <= 16 for fault in faults if "killed" not in fault.cause)
